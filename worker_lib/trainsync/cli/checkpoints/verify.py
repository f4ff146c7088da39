"""``trainsync checkpoints verify``."""

import time
from typing import Annotated

import typer
from rich.filesize import decimal

from trainsync.api.words import counted
from trainsync.cli.checkpoints import reports
from trainsync.cli.options import DEFAULT_THREADS, AsJson, Directory, Threads, open_run
from trainsync.cli.output import tables
from trainsync.cli.output.console import DAMAGED, USAGE, emit, fail, guarded, stderr
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.inspect import leftovers as leftovers
from trainsync.storage.inspect.findings import Finding, in_order
from trainsync.storage.inspect.internal import in_internal
from trainsync.storage.inspect.pointers import check_pointers
from trainsync.storage.inspect.saves import (
    InspectedSave,
    bytes_to_read,
    check_all_sizes,
    check_digests,
)
from trainsync.storage.layout import RunDirectory


@guarded
def verify(
    directory: Directory,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.")] = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: AsJson = False,
) -> None:
    """Read every committed file, compare its digest with the manifest, and look for leftovers.

    Damage is a committed file, manifest or pointer that is not what it must be. A leftover is
    harmless: an unlisted or temporary file, a half-promoted step, what is in staging or trash.
    While the run is at work, what it is just writing shows as leftovers.
    """
    run = open_run(directory)
    saves = check_all_sizes(run, step)
    if step is not None and not saves:
        fail(f"step {step} is not committed in {directory}", USAGE)
    size = bytes_to_read(saves)
    started = time.perf_counter()
    with bytes_bar("reading", size) as tell:
        checked = check_digests(run, saves, threads=threads, on_bytes=tell)
    seconds = time.perf_counter() - started
    findings = in_order([*reports.of_saves(checked), *_beside(run, checked, step)])
    damage = sum(finding.is_damage for finding in findings)
    if as_json:
        emit(
            {
                "directory": str(directory),
                "saves": [report.to_json_dict() for report in reports.report(run, checked)],
                "findings": [finding.to_json_dict() for finding in findings],
                "read": {"bytes": size, "seconds": round(seconds, 3), "threads": threads},
            }
        )
    else:
        tables.print_saves(reports.report(run, checked))
        tables.print_findings(findings)
        rate = f", {decimal(int(size / seconds))}/s" if size else ""
        stderr().print(
            f"{counted(len(checked), 'save')}, {decimal(size)} read in {seconds:.1f} s{rate}; "
            f"{damage} damaged, {counted(len(findings) - damage, 'leftover')}"
        )
    if damage:
        raise typer.Exit(DAMAGED)


def _beside(run: RunDirectory, saves: list[InspectedSave], step: int | None) -> list[Finding]:
    if step is not None:
        return leftovers.in_steps(run, saves, step)
    return [
        *check_pointers(run, saves),
        *leftovers.in_root(run),
        *leftovers.in_steps(run, saves),
        *leftovers.in_staging(run),
        *in_internal(run),
    ]
