"""The ``trainsync`` command: what is under it."""

from importlib import metadata
from typing import Annotated

import typer

from trainsync.cli import checkpoints, run
from trainsync.cli.output.console import say

app = typer.Typer(
    help="Look at training runs, and after their checkpoints.",
    epilog=(
        "Start here: `trainsync run status NAME` for a run in a cluster, `trainsync checkpoints "
        "ls DIR` for a run's directory, the one with global_step_N in it. Shell completion: "
        "`trainsync --install-completion`."
    ),
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs of docstrings are wrapped anew
    pretty_exceptions_show_locals=False,  # a traceback must not print what a checkpoint holds
)
app.add_typer(run.app, name="run")
app.add_typer(checkpoints.app, name="checkpoints")


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"trainsync {metadata.version('trainsync')}")
    except metadata.PackageNotFoundError:
        say("trainsync runs from a copy of its source, which has no version")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version  # seen to by its callback
