"""``trainsync checkpoints show``."""

from typing import Any

import typer
from rich.filesize import decimal

from trainsync.api.base import format_time
from trainsync.api.words import clean
from trainsync.cli.checkpoints import reports
from trainsync.cli.checkpoints.reports import SaveReport
from trainsync.cli.options import AsJson, Directory, Kind, StepOrLatest, chosen_step, open_run
from trainsync.cli.output import tables
from trainsync.cli.output.console import DAMAGED, USAGE, emit, fail, guarded, stdout
from trainsync.storage.digest import ALGORITHM
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.inspect.findings import in_order
from trainsync.storage.inspect.pointers import check_pointers
from trainsync.storage.inspect.saves import check_all_sizes
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import receipts
from trainsync.storage.saves.manifest import Manifest


@guarded
def show(
    directory: Directory, step_name: StepOrLatest, kind: Kind = None, as_json: AsJson = False
) -> None:
    """Show what a step's manifests say: participants, time, and every file with its digest."""
    run = open_run(directory)
    step = chosen_step(run, step_name, kind)
    everything = check_all_sizes(run)
    saves = [s for s in everything if s.step == step and kind in (None, s.kind)]
    if not saves:
        what = f"step {step}" if kind is None else f"{kind.value} {step}"
        fail(f"{what} is not committed in {directory}", USAGE)
    found = reports.report(run, saves)
    pointers = [f for f in check_pointers(run, everything) if f.step == step]
    findings = in_order([*reports.of_saves(saves), *pointers])
    if as_json:
        emit(
            {
                "directory": str(directory),
                "step": step,
                "saves": [report.to_json_dict() | _details(run, report) for report in found],
                "findings": [finding.to_json_dict() for finding in findings],
            }
        )
    else:
        for report in found:
            _print(run, report)
        tables.print_findings(findings)
    if any(finding.is_damage for finding in findings):
        raise typer.Exit(DAMAGED)


def _details(run: RunDirectory, report: SaveReport) -> dict[str, Any]:
    if report.save.committed is None:
        return {"runUid": None, "participants": [], "fileList": [], "seconds": None}
    record = report.save.committed.manifest
    return {
        "runUid": record.run_uid,
        "participants": [
            {"component": participant.component, "rank": participant.rank}
            for participant in record.participants
        ],
        "fileList": [
            {"path": entry.path, "bytes": entry.bytes, "digest": entry.digest}
            for entry in record.files
        ],
        "seconds": _seconds(run, record),
    }


def _seconds(run: RunDirectory, record: Manifest) -> float | None:
    """From registration to commit; None when staging no longer tells."""
    staged = run.save(record.attempt, record.incarnation, record.kind, record.step)
    try:
        registered = receipts.read_registration(staged).created_at
    except (FileNotFoundError, DamagedFileError):
        return None
    return max((record.created_at - registered).total_seconds(), 0.0)


def _print(run: RunDirectory, report: SaveReport) -> None:
    console = stdout()
    console.print(f"{report.save.kind.value} of step {report.save.step}", style="bold")
    if report.save.committed is None:
        return
    committed, record = report.save.committed, report.save.committed.manifest
    seconds = _seconds(run, record)
    lines = {
        "committed": format_time(record.created_at)
        + ("" if seconds is None else f", {seconds:.1f} s after it was registered"),
        "attempt": f"{record.attempt}, incarnation {record.incarnation}, run {record.run_uid}",
        "size": f"{decimal(record.bytes)} in {len(record.files)} files",
        "manifest": committed.digest,
        "latest": "yes" if report.pointed_at else "no",
        "leases": ", ".join(report.leases) or "none",
        "participants": _participants(record),
    }
    for name, text in lines.items():
        console.print(f"  {name:12}  {clean(text)}", markup=False, soft_wrap=True)
    table = tables.new_table()
    table.add_column("file", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column(ALGORITHM, overflow="fold")
    for entry in record.files:
        table.add_row(entry.path, decimal(entry.bytes), entry.digest.partition(":")[2])
    console.print(table)


def _participants(record: Manifest) -> str:
    ranks: dict[str, list[int]] = {}
    for participant in record.participants:
        ranks.setdefault(participant.component, []).append(participant.rank)
    return "; ".join(f"{component} {_ranges(found)}" for component, found in ranks.items())


def _ranges(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
