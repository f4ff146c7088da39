"""``trainsync checkpoints merge``."""

import importlib
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.filesize import decimal

from trainsync.api.protocol import SaveKind
from trainsync.api.words import clean
from trainsync.checkpoint.errors import CheckpointError
from trainsync.cli.options import AsJson, Directory, Kind, StepOrLatest, chosen_step, open_run
from trainsync.cli.output.console import USAGE, emit, fail, guarded, stdout
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.inspect.saves import committed_pairs
from trainsync.storage.layout import RunDirectory


class Dtype(StrEnum):
    """The dtypes in which weights can be written."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@guarded
def merge(
    directory: Directory,
    step_name: StepOrLatest,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New directory for the model.", metavar="DIR")
    ],
    kind: Kind = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the weights; as saved by default.")
    ] = None,
    subdir: Annotated[
        str | None, typer.Option(help="Folder of the shards, where several have a model's.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Base model (Hugging Face), for a LoRA adapter alone.", metavar="DIR"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put a step's shards together into a Hugging Face directory. Needs torch, but no GPU.

    Every file is checked, and the directory appears when it is complete. The checkpoint of
    the step is taken, or else its state dict, unless --kind says which.
    """
    run = open_run(directory)
    step = chosen_step(run, step_name, kind)
    chosen = _choose(run, directory, step, kind)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        fail(f"{output} is there already and not empty: give a new directory", USAGE)
    merging = _merging()
    done = 0
    with bytes_bar("checking and merging", None) as tell:

        def on_progress(now: int, total: int) -> None:
            nonlocal done
            tell(now - done, total)
            done = now

        try:
            result = merging.merge_to_hf(
                directory,
                step,
                output,
                kind=chosen,
                dtype=None if dtype is None else dtype.value,
                subdir=subdir,
                base=base,
                on_progress=on_progress,
            )
        except CheckpointError as error:
            fail(f"{chosen.value} {step} was not merged: {error}")
    if as_json:
        emit(
            {
                "directory": str(directory),
                "step": step,
                "kind": chosen.value,
                "output": str(result.output),
                "tensors": result.tensors,
                "bytes": result.bytes,
                "files": list(result.files),
                "tied": list(result.tied),
            }
        )
    else:
        line = (
            f"{chosen.value} {step} is now in {result.output}: {result.tensors} tensors, "
            f"{decimal(result.bytes)}"
        )
        stdout().print(clean(line), markup=False, soft_wrap=True)


def _choose(run: RunDirectory, directory: Path, step: int, kind: SaveKind | None) -> SaveKind:
    there = [k for _, k in committed_pairs(run, step) if kind in (None, k)]
    if not there:
        what = f"step {step}" if kind is None else f"{kind.value} {step}"
        fail(f"{what} is not committed in {directory}", USAGE)
    return there[0]  # a checkpoint comes first


def _merging() -> ModuleType:
    # Imported here, since all other commands work where there is no torch.
    try:
        return importlib.import_module("trainsync.checkpoint.merge.merge")
    except ModuleNotFoundError as error:
        name = error.name or "a package"
        if name.startswith("trainsync"):
            raise
        fail(
            f"merge needs {name}, which is not installed: in a clone of trainsync, "
            "pip install '.[worker]'"
        )
