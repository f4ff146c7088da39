"""Arguments and options that commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from trainsync.api.protocol import SaveKind
from trainsync.cli.output.console import DAMAGED, USAGE, fail
from trainsync.storage.errors import DamagedFileError, DanglingPointerError
from trainsync.storage.inspect.findings import is_run_directory
from trainsync.storage.layout import MAX_STEP, RunDirectory, parse_step

DirectoryOrUrl = Annotated[
    str,
    typer.Argument(
        help="The run's directory, or the URL of a store: s3://bucket/prefix, gs://, az://.",
        metavar="DIR|URL",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(help="Endpoint of a store that is not the cloud's own.", metavar="URL"),
]
Region = Annotated[str | None, typer.Option(help="Region of the bucket (default: AWS_REGION).")]
AllowHttp = Annotated[bool, typer.Option("--allow-http", help="The endpoint may be plain http://.")]
StepOrLatest = Annotated[str, typer.Argument(help="Number of the step, or latest.", metavar="STEP")]
MaybeStep = Annotated[
    str | None,
    typer.Argument(help="Number of the step, or latest (the default).", metavar="[STEP]"),
]
StepOption = Annotated[
    str | None, typer.Option("--step", help="Number of the step, or latest.", metavar="STEP")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Threads = Annotated[int, typer.Option(min=1, max=256, help="Files read at once.")]
LATEST: Final = "latest"
# One for each core, but more than one where there is one, and no crowd on a disk.
DEFAULT_THREADS: Final = min(max(os.cpu_count() or 1, 4), 16)
Kind = Annotated[SaveKind | None, typer.Option(help="Which of the step's saves.")]


def open_run(directory: Path) -> RunDirectory:
    """The run in ``directory``; ends the command when that holds something else.

    Raises:
        OSError: it cannot be read.
    """
    if not directory.exists():
        raise typer.BadParameter(f"Directory '{directory}' does not exist.", param_hint="DIR")
    if not directory.is_dir():
        raise typer.BadParameter(f"Directory '{directory}' is a file.", param_hint="DIR")
    run = RunDirectory(directory)
    if not is_run_directory(run):
        hint = "give the directory that holds global_step_N"
        if parse_step(directory.resolve().name) is not None:
            hint = f"that is one step: give {directory.resolve().parent}"
        fail(f"{directory} is not the directory of a run: {hint}", USAGE)
    return run


def chosen(
    place: str, read_pointer: Callable[[SaveKind], int | None], text: str, kind: SaveKind | None
) -> int:
    """The step that ``text`` names; ``latest`` is that of the pointer: of checkpoints, or else of
    state dicts, unless ``kind`` says which. Ends the command when there is none.

    Raises:
        OSError, StorageError: the pointer cannot be read.
    """
    if text != LATEST:
        if not text.isdecimal() or len(text) > len(str(MAX_STEP)) or int(text) > MAX_STEP:
            fail(f"STEP is {text!r}; expected a number from 0 to {MAX_STEP}, or {LATEST}", USAGE)
        return int(text)
    named: list[int] = []
    for wanted in SaveKind if kind is None else (kind,):
        try:
            step = read_pointer(wanted)
        except (DamagedFileError, DanglingPointerError) as error:
            fail(f"no {LATEST} {wanted.value}: {error}", DAMAGED)
        named += [] if step is None else [step]
    if not named:
        fail(f"{place} has no {LATEST} step: nothing is committed", USAGE)
    return named[0]
