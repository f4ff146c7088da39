"""``trainsync checkpoints``: list and verify what is committed in a run's directory."""

import json
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from trainsync.cli import reports
from trainsync.cli.reports import SaveReport
from trainsync.storage.layout import RunDirectory

app = typer.Typer(help="Committed checkpoints of a run's directory.", no_args_is_help=True)

DAMAGED: Final = 1
USAGE: Final = 2

Directory = Annotated[
    Path,
    typer.Argument(
        help="The run's directory: the one with global_step_N in it.",
        exists=True,
        file_okay=False,
        metavar="DIR",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


@app.command("ls")
def list_saves(directory: Directory, as_json: AsJson = False) -> None:
    """List committed saves, each compared with its manifest by size."""
    run = RunDirectory(directory)
    found = [
        reports.check_save(run, step, kind, with_digest=False)
        for step, kind in reports.steps_to_check(run, None)
    ]
    _show(found, reports.pointer_problems(run), as_json=as_json)


@app.command()
def verify(
    directory: Directory,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every committed file and compare its digest with the manifest."""
    run = RunDirectory(directory)
    pairs = reports.steps_to_check(run, step)
    if step is not None and not pairs:
        Console(stderr=True).print(f"step {step} is not committed in {directory}", style="red")
        raise typer.Exit(USAGE)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=as_json,
    )
    found = []
    with progress:
        for number, kind in pairs:
            size = reports.check_save(run, number, kind, with_digest=False).bytes
            task = progress.add_task(f"step {number} {kind.value}", total=size)
            found.append(
                reports.check_save(
                    run,
                    number,
                    kind,
                    with_digest=True,
                    on_file=lambda entry, task=task: progress.advance(task, entry.bytes),  # type: ignore[misc]
                )
            )
    _show(found, reports.pointer_problems(run) if step is None else [], as_json=as_json)


def _show(saves: list[SaveReport], pointer_problems: list[str], *, as_json: bool) -> None:
    if as_json:
        document = {
            "saves": [save.to_json_dict() for save in saves],
            "pointerProblems": pointer_problems,
        }
        typer.echo(json.dumps(document, indent=1))
    else:
        _print_table(saves, pointer_problems)
    if pointer_problems or any(save.problem for save in saves):
        raise typer.Exit(DAMAGED)


def _print_table(saves: list[SaveReport], pointer_problems: list[str]) -> None:
    console = Console()
    table = Table("step", "kind", "attempt", "files", "size", "committed", "state", box=SIMPLE)
    for save in saves:
        table.add_row(
            str(save.step),
            save.kind.value,
            "" if save.attempt is None else str(save.attempt),
            str(save.files),
            decimal(save.bytes),
            save.time or "",
            ("[red]damaged[/red]" if save.problem else "ok")
            + (", latest" if save.pointed_at else ""),
        )
    console.print(table if saves else "nothing is committed")
    for problem in [*(save.problem for save in saves if save.problem), *pointer_problems]:
        console.print(problem, style="red", markup=False, soft_wrap=True)
