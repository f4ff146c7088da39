"""``trainsync checkpoints merge``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from trainsync.api.protocol import SaveKind
from trainsync.api.words import clean
from trainsync.cli.checkpoints.merging import (
    Chosen,
    MergeOptions,
    chosen_kind,
    merge_step,
    work_directory,
)
from trainsync.cli.checkpoints.places import (
    DirectoryPlace,
    StorePlace,
    open_place,
    refuse_options,
    store_of,
)
from trainsync.cli.options import (
    AllowHttp,
    AsJson,
    DirectoryOrUrl,
    Endpoint,
    Kind,
    Region,
    StepOrLatest,
)
from trainsync.cli.output.console import USAGE, emit, fail, guarded, stdout
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.objects import address, folders
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.folders import FolderTakenError
from trainsync.storage.objects.opening import StoreOptions

_FILES_AT_ONCE = 4
_CONFIG = "config.json"  # without it nothing loads a model


class Dtype(StrEnum):
    """The dtypes in which weights can be written."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


DtypeOption = Annotated[Dtype | None, typer.Option(help="Of the weights; as saved by default.")]
Subdir = Annotated[
    str | None, typer.Option(help="Folder of the shards, where several have a model's.")
]
Base = Annotated[
    Path | None,
    typer.Option(help="Base model (Hugging Face), for a LoRA adapter alone.", metavar="DIR"),
]


@guarded
def merge(
    directory: DirectoryOrUrl,
    step_name: StepOrLatest,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="New directory, or prefix in a store.", metavar="DIR|URL"
        ),
    ],
    kind: Kind = None,
    dtype: DtypeOption = None,
    subdir: Subdir = None,
    base: Base = None,
    endpoint: Endpoint = None,
    region: Region = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Put a step's shards together into a Hugging Face directory. Needs torch, but no GPU.

    Every file is checked, and the directory appears when it is complete. The checkpoint of
    the step is taken, or else its state dict, unless --kind says which.

    From a store, the model's shards are copied beside the output first, and removed at the end.
    Into a store, the model is merged in TMPDIR, and config.json is put last: until then nothing
    loads.
    """
    options = StoreOptions(endpoint, region, allow_http)
    if not address.is_url(directory) and not address.is_url(output):
        refuse_options(options)
    place = open_place(directory, options if address.is_url(directory) else StoreOptions())
    assert isinstance(place, DirectoryPlace | StorePlace)
    step = place.chosen_step(step_name, kind)
    chosen = chosen_kind(place, step, kind)
    asked = MergeOptions(None if dtype is None else dtype.value, subdir, base)
    if address.is_url(output):
        result, where = _into_store(place, step, chosen, store_of(output, options), asked)
    else:
        folder = Path(output)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            fail(f"{folder} is there already and not empty: give a new directory", USAGE)
        result = merge_step(place, step, chosen, folder, asked)
        where = str(result.output)
    if as_json:
        emit(
            {
                "directory": directory,
                "step": step,
                "kind": chosen.value,
                "output": where,
                "tensors": result.tensors,
                "bytes": result.bytes,
                "files": list(result.files),
                "tied": list(result.tied),
            }
        )
    else:
        line = (
            f"{chosen.value} {step} is now in {where}: {result.tensors} tensors, "
            f"{decimal(result.bytes)}"
        )
        stdout().print(clean(line), markup=False, soft_wrap=True)


def _into_store(
    place: Chosen, step: int, kind: SaveKind, bucket: ObjectBucket, options: MergeOptions
) -> tuple[Any, str]:
    """The merge's result, and where it is."""
    if f"{bucket.name}/".startswith(f"{place.name}/"):
        fail(f"{bucket.name} is inside the run's store; expected a place outside it", USAGE)
    try:
        folders.require_empty(bucket)  # before the work
        with work_directory() as work:
            folder = Path(work) / "model"
            result = merge_step(place, step, kind, folder, options)
            with bytes_bar("putting", result.bytes) as tell:
                folders.put_folder(
                    bucket, folder, result.files, _CONFIG, threads=_FILES_AT_ONCE, on_bytes=tell
                )
    except FolderTakenError as error:
        fail(str(error), USAGE)
    return result, bucket.name
