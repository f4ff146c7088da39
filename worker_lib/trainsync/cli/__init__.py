"""The ``trainsync`` command."""

import typer

from trainsync.cli import checkpoints

app = typer.Typer(help="Look after training runs.", no_args_is_help=True, add_completion=False)
app.add_typer(checkpoints.app, name="checkpoints")


@app.callback()
def _root() -> None:
    """Look after training runs."""


def main() -> None:
    """Entry point. Exit code 0: all is well; 1: something is damaged; 2: wrong usage."""
    app()
