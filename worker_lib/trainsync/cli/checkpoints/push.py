"""``trainsync checkpoints push``."""

from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from trainsync.api.words import clean
from trainsync.checkpoint.errors import CheckpointError
from trainsync.cli.checkpoints.merge import Base, DtypeOption, Subdir
from trainsync.cli.checkpoints.merging import (
    MergeOptions,
    chosen_kind,
    merge_step,
    work_directory,
)
from trainsync.cli.checkpoints.places import DirectoryPlace, StorePlace, open_place, refuse_options
from trainsync.cli.extras import import_extra
from trainsync.cli.options import AllowHttp, AsJson, Endpoint, Kind, Region
from trainsync.cli.output.console import USAGE, emit, fail, guarded, stderr, stdout
from trainsync.storage.layout import parse_step
from trainsync.storage.objects import address
from trainsync.storage.objects.opening import StoreOptions


class Visibility(StrEnum):
    """Of a repository that is made."""

    PRIVATE = "private"
    PUBLIC = "public"


@guarded
def push(
    source: Annotated[
        str,
        typer.Argument(
            help="A merged model's directory; with --step a run's directory or a store's URL.",
            metavar="MODEL|DIR|URL",
        ),
    ],
    repo: Annotated[str, typer.Argument(help="NAMESPACE/NAME.", metavar="REPO")],
    step_name: Annotated[
        str | None,
        typer.Option("--step", help="Merge this step (a number, or latest).", metavar="STEP"),
    ] = None,
    kind: Kind = None,
    dtype: DtypeOption = None,
    subdir: Subdir = None,
    base: Base = None,
    revision: Annotated[str, typer.Option(help="Branch, which must be there.")] = "main",
    create: Annotated[
        Visibility | None, typer.Option(help="Make the repository where there is none.")
    ] = None,
    message: Annotated[
        str | None,
        typer.Option(
            "--commit-message", help="Message of the commit; the default names the step or model."
        ),
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Push a merged model to a Hugging Face repository, as one commit. Needs huggingface_hub.

    The token is that of HF_TOKEN or of `hf auth login`. The model is looked at before anything is
    sent: a file that is cut short or missing is refused. Old weights in the repository that the
    new ones do not replace are removed by the same commit; other files stay.

    With --step the step is merged first, in TMPDIR; a store's needs room for its shards there, too.
    """
    options = StoreOptions(endpoint, region, allow_http)
    merge = MergeOptions(None if dtype is None else dtype.value, subdir, base)
    if step_name is None and (merge.given or kind is not None):
        fail("--kind, --dtype, --subdir and --base are for a merge: give --step too", USAGE)
    if message is not None and not message.strip():
        fail("--commit-message is empty", USAGE)
    hub = _hub("repository")
    try:
        target = hub.Repository(
            repo, revision=revision, create=None if create is None else hub.Visibility(create.value)
        )
        if step_name is None:
            folder = _model(source, options)
            _hub("model_files").model_files(folder)  # before the network is asked
            pushed = _push(target, folder, message or "Upload a model merged by trainsync")
        else:
            place = open_place(source, options)
            assert isinstance(place, DirectoryPlace | StorePlace)
            step = place.chosen_step(step_name, kind)
            chosen = chosen_kind(place, step, kind)
            target.check()  # before the work
            with work_directory() as work:
                folder = Path(work) / "model"
                merge_step(place, step, chosen, folder, merge)
                pushed = _push(target, folder, message or f"Upload {chosen.value} {step}")
    except CheckpointError as error:
        fail(f"the push failed: {error}")
    if as_json:
        emit(
            {
                "source": source,
                "repo": pushed.repo,
                "revision": pushed.revision,
                "commit": pushed.commit,
                "url": pushed.url,
                "files": pushed.files,
                "bytes": pushed.bytes,
                "removed": list(pushed.removed),
            }
        )
        return
    line = f"{pushed.files} files, {decimal(pushed.bytes)}, are now in {pushed.url}"
    if pushed.removed:
        line += f"; old weights removed: {', '.join(pushed.removed)}"
    stdout().print(clean(line), markup=False, soft_wrap=True)


def _model(source: str, options: StoreOptions) -> Path:
    """The directory of a merged model; ends the command when it is something else."""
    if address.is_url(source):
        fail(f"{source} is a store: give --step, or the directory of a merged model", USAGE)
    refuse_options(options)
    folder = Path(source)
    if not folder.is_dir():
        fail(f"{folder} is not a directory", USAGE)
    if any(parse_step(path.name) is not None for path in folder.iterdir()):
        fail(f"{folder} is the directory of a run: give --step, or that of a merged model", USAGE)
    return folder


def _push(target: Any, folder: Path, message: str) -> Any:
    return target.push(folder, message, bars=stderr().is_terminal)


def _hub(name: str) -> ModuleType:
    return import_extra(f"trainsync.checkpoint.hub.{name}", "push", "hub")
