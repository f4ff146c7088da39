"""``trainsync checkpoints ls``."""

from typing import Annotated

import typer

from trainsync.cli.checkpoints import reports
from trainsync.cli.checkpoints.places import open_place
from trainsync.cli.checkpoints.remedies import JUDGED_BY_SIZE
from trainsync.cli.options import AllowHttp, AsJson, DirectoryOrUrl, Endpoint, Region
from trainsync.cli.output import tables
from trainsync.cli.output.console import DAMAGED, emit, guarded, say
from trainsync.storage.inspect.findings import in_order
from trainsync.storage.objects.opening import StoreOptions


@guarded
def list_saves(
    directory: DirectoryOrUrl,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Also say which steps `prune --keep` would leave."),
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """List committed saves, the newest last, each compared with its manifest by size."""
    place = open_place(directory, StoreOptions(endpoint, region, allow_http))
    saves = place.saves()
    removed = None if keep is None else place.removals(saves, keep)
    found = place.reports(saves, removed)
    findings = in_order([*reports.of_saves(saves), *place.pointer_findings(saves)])
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
        if saves:
            say(f"{JUDGED_BY_SIZE}; `verify` reads their bytes")
    if any(finding.is_damage for finding in findings):
        raise typer.Exit(DAMAGED)
