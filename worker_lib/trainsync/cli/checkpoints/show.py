"""``trainsync checkpoints show``."""

from collections.abc import Mapping
from typing import Any

import typer
from rich.filesize import decimal

from trainsync.api.base import format_time
from trainsync.api.words import clean
from trainsync.cli.checkpoints import reports
from trainsync.cli.checkpoints.places import CheckpointPlace, open_place
from trainsync.cli.checkpoints.reports import Kept, SaveReport
from trainsync.cli.options import (
    LATEST,
    AllowHttp,
    AsJson,
    DirectoryOrUrl,
    Endpoint,
    Kind,
    MaybeStep,
    Region,
    StepOption,
)
from trainsync.cli.output import tables
from trainsync.cli.output.console import DAMAGED, USAGE, emit, fail, guarded, stdout
from trainsync.storage.digest import ALGORITHM
from trainsync.storage.inspect.findings import in_order
from trainsync.storage.objects.opening import StoreOptions
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry


@guarded
def show(
    directory: DirectoryOrUrl,
    step_name: MaybeStep = None,
    step_option: StepOption = None,
    kind: Kind = None,
    endpoint: Endpoint = None,
    region: Region = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Show what a step's manifests say: participants, time, and every file with its digest."""
    if None not in (step_name, step_option) and step_name != step_option:
        fail(f"STEP is {step_name!r} and --step {step_option!r}: give one of them", USAGE)
    place = open_place(directory, StoreOptions(endpoint, region, allow_http))
    step = place.chosen_step(step_name or step_option or LATEST, kind)
    everything = place.around(step)
    saves = [s for s in everything if s.step == step and kind in (None, s.kind)]
    if not saves:
        what = f"step {step}" if kind is None else f"{kind.value} {step}"
        fail(f"{what} is not committed in {directory}", USAGE)
    found = place.reports(saves)
    pointers = [f for f in place.pointer_findings(everything) if f.step == step]
    findings = in_order([*reports.of_saves(saves), *pointers])
    if as_json:
        emit(
            {
                "directory": str(directory),
                "step": step,
                "saves": [report.to_json_dict() | _details(place, report) for report in found],
                "findings": [finding.to_json_dict() for finding in findings],
            }
        )
    else:
        for report in found:
            _print(place, report)
        tables.print_findings(findings)
    if any(finding.is_damage for finding in findings):
        raise typer.Exit(DAMAGED)


def _details(place: CheckpointPlace, report: SaveReport) -> dict[str, Any]:
    if report.save.committed is None:
        return {"runUid": None, "participants": [], "fileList": [], "keptBytes": 0, "seconds": None}
    record = report.save.committed.manifest
    kept = place.kept(report.save)
    return {
        "runUid": record.run_uid,
        "participants": [
            {"component": participant.component, "rank": participant.rank}
            for participant in record.participants
        ],
        "fileList": [
            {
                "path": entry.path,
                "bytes": entry.bytes,
                "digest": entry.digest,
            }
            | _written(entry, kept.get(entry.path), record.step)
            for entry in record.files
        ],
        "keptBytes": sum(found.bytes for found in kept.values()),
        "seconds": place.seconds(record),
    }


def _print(place: CheckpointPlace, report: SaveReport) -> None:
    console = stdout()
    console.print(f"{report.save.kind.value} of step {report.save.step}", style="bold")
    if report.save.committed is None:
        return
    committed, record = report.save.committed, report.save.committed.manifest
    seconds, kept = place.seconds(record), place.kept(report.save)
    lines = {
        "committed": format_time(record.created_at)
        + ("" if seconds is None else f", {seconds:.1f} s after it was registered"),
        "attempt": f"{record.attempt}, incarnation {record.incarnation}, run {record.run_uid}",
        "size": f"{decimal(record.bytes)} in {len(record.files)} files" + _of_older(kept),
        "manifest": committed.digest,
        "latest": "yes" if report.pointed_at else "no",
        "leases": ", ".join(report.leases) or "none",
        "participants": _participants(record),
    }
    for name, text in lines.items():
        console.print(f"  {name:12}  {clean(text)}", markup=False, soft_wrap=True)
    console.print()
    # No table: it would wrap digests at 80 columns, and a digest on two lines cannot be copied.
    console.print(f"{ALGORITHM:32} {'size':>9}  file", style="bold", soft_wrap=True)
    for entry in record.files:
        line = f"{entry.digest.partition(':')[2]:32} {decimal(entry.bytes):>9}  {entry.path}"
        if (older := kept.get(entry.path)) is not None:
            part = "" if older.bytes == entry.bytes else f"{decimal(older.bytes)} "
            line += f"  ({part}of step {older.step})"
        console.print(clean(line), markup=False, soft_wrap=True)
    console.print()


def _written(entry: FileEntry, kept: Kept | None, step: int) -> dict[str, Any]:
    """By which step the file was put, and how many bytes of it are of which older one."""
    if kept is None:
        return {"writtenBy": step, "keptBytes": 0, "keptOf": None}
    whole = kept.bytes == entry.bytes
    return {
        "writtenBy": kept.step if whole else step,
        "keptBytes": kept.bytes,
        "keptOf": kept.step,
    }


def _of_older(kept: Mapping[str, Kept]) -> str:
    if not kept:
        return ""
    size = sum(found.bytes for found in kept.values())
    return f", {decimal(size)} of them of older steps"


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
