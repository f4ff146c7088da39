"""Arguments and options that commands share."""

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from trainsync.api.protocol import SaveKind
from trainsync.cli.output.console import USAGE, fail
from trainsync.storage.inspect.findings import is_run_directory
from trainsync.storage.layout import MAX_STEP, RunDirectory, parse_step

Directory = Annotated[
    Path,
    typer.Argument(
        help="The run's directory: the one with global_step_N in it.",
        exists=True,
        file_okay=False,
        metavar="DIR",
    ),
]
Step = Annotated[
    int, typer.Argument(min=0, max=MAX_STEP, help="Number of the step.", metavar="STEP")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Threads = Annotated[int, typer.Option(min=1, max=256, help="Files read at once.")]
# One for each core, but more than one where there is one, and no crowd on a disk.
DEFAULT_THREADS: Final = min(max(os.cpu_count() or 1, 4), 16)
Kind = Annotated[SaveKind | None, typer.Option(help="Which of the step's saves.")]


def open_run(directory: Path) -> RunDirectory:
    """The run in ``directory``; ends the command when that holds something else.

    Raises:
        OSError: it cannot be read.
    """
    run = RunDirectory(directory)
    if not is_run_directory(run):
        hint = "give the directory that holds global_step_N"
        if parse_step(directory.resolve().name) is not None:
            hint = f"that is one step: give {directory.resolve().parent}"
        fail(f"{directory} is not the directory of a run: {hint}", USAGE)
    return run
