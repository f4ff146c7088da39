"""Tables and lists for people, readable at 80 columns and in a file."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.filesize import decimal
from rich.table import Table

from trainsync.api.base import format_time
from trainsync.api.words import clean
from trainsync.cli.checkpoints.reports import SaveReport
from trainsync.cli.output.console import stdout
from trainsync.storage.inspect.findings import Finding, in_order


def new_table() -> Table:
    """An empty one, with little space lost between its columns."""
    return Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))


def print_saves(reports: Sequence[SaveReport]) -> None:
    """One line for each save."""
    if not reports:
        stdout().print("nothing is committed")
        return
    table = new_table()
    for name in ("step", "kind", "attempt", "files", "size", "committed"):
        right = name not in ("kind", "committed")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("state")
    for report in reports:
        committed = report.save.committed
        record = committed.manifest if committed else None
        table.add_row(
            str(report.save.step),
            report.save.kind.value,
            str(record.attempt) if record else "",
            str(len(record.files)) if record else "",
            decimal(record.bytes) if record else "",
            format_time(record.created_at) if record else "",
            _state(report),
        )
    stdout().print(table)


def print_findings(findings: Sequence[Finding]) -> None:
    """One line for each, damage first."""
    console = stdout()
    for finding in in_order(findings):
        word, style = ("damage", "red") if finding.is_damage else ("leftover", "yellow")
        console.print(f"{word:8}  {clean(str(finding))}", style=style, markup=False, soft_wrap=True)


def _state(report: SaveReport) -> str:
    words = ["ok" if report.save.valid else "[red]damaged[/red]"]
    if report.pointed_at:
        words.append("latest")
    if report.leases:
        words.append("leased")
    if report.kept is not None:
        words.append("kept" if report.kept else "[yellow]would go[/yellow]")
    return ", ".join(words)
