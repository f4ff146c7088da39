"""``trainsync checkpoints ls``."""

from typing import Annotated

import typer

from trainsync.cli.checkpoints import prune_plan, reports
from trainsync.cli.options import AsJson, Directory, open_run
from trainsync.cli.output import tables
from trainsync.cli.output.console import DAMAGED, emit, guarded
from trainsync.storage.inspect.findings import in_order
from trainsync.storage.inspect.pointers import check_pointers
from trainsync.storage.inspect.saves import check_all_sizes


@guarded
def list_saves(
    directory: Directory,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Also say which steps `prune --keep` would leave."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List committed saves, the newest last, each compared with its manifest by size."""
    run = open_run(directory)
    saves = check_all_sizes(run)
    removed = None if keep is None else prune_plan.choose(run, saves, keep)
    found = reports.report(run, saves, removed)
    pointers = check_pointers(run, saves)
    findings = in_order([*reports.of_saves(saves), *pointers])
    if as_json:
        emit(
            {
                "directory": str(directory),
                "saves": [report.to_json_dict() for report in found],
                "findings": [finding.to_json_dict() for finding in findings],
            }
        )
    else:
        tables.print_saves(found)
        tables.print_findings(findings)
    if any(finding.is_damage for finding in findings):
        raise typer.Exit(DAMAGED)
