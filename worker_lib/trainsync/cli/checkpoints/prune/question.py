"""What ``prune`` says before it removes anything, and its question."""

import typer
from rich.filesize import decimal

from trainsync.api.words import counted
from trainsync.cli.checkpoints.prune.plan import PrunedStep
from trainsync.cli.output import tables
from trainsync.cli.output.console import can_ask, fail, stdout


def print_removals(removals: list[PrunedStep]) -> None:
    """The steps that would go, on stdout."""
    if not removals:
        stdout().print("nothing to remove")
        return
    table = tables.new_table()
    table.add_column("step", justify="right")
    table.add_column("kinds")
    table.add_column("frees", justify="right")
    for removal in removals:
        kinds = ", ".join(kind.value for kind in removal.kinds)
        table.add_row(str(removal.step), kinds, decimal(removal.bytes))
    stdout().print(table)
    total = decimal(sum(removal.bytes for removal in removals))
    stdout().print(f"{counted(len(removals), 'step')} to remove, {total}")


def confirm(question: str, *, yes: bool) -> None:
    """Ask, unless that was answered; ends the command when the answer is no."""
    if yes:
        return
    if not can_ask():
        fail(
            "nothing was removed: the input is no terminal, so the question cannot be asked; "
            "give --yes"
        )
    if not typer.confirm(question, err=True):
        fail("nothing was removed")
