"""``trainsync checkpoints verify``."""

import time
from typing import Annotated

import typer
from rich.filesize import decimal

from trainsync.api.words import counted
from trainsync.cli.checkpoints import remedies, reports
from trainsync.cli.checkpoints.places import open_place
from trainsync.cli.options import (
    DEFAULT_THREADS,
    AllowHttp,
    AsJson,
    DirectoryOrUrl,
    Endpoint,
    Region,
    Threads,
)
from trainsync.cli.output import tables
from trainsync.cli.output.console import DAMAGED, USAGE, emit, fail, guarded, say, stderr
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.inspect.findings import in_order
from trainsync.storage.objects.opening import StoreOptions


@guarded
def verify(
    directory: DirectoryOrUrl,
    step_name: Annotated[
        str | None,
        typer.Option("--step", help="Only this step: a number, or latest.", metavar="STEP"),
    ] = None,
    threads: Threads = DEFAULT_THREADS,
    endpoint: Endpoint = None,
    region: Region = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Read every committed file, compare its digest with the manifest, and look for leftovers.

    Damage is a committed file, manifest or pointer that is not what it must be. A leftover is
    harmless: an unlisted or temporary file, a half-promoted step, what is in staging or trash.
    While the run is at work, what it is just writing shows as leftovers.
    """
    place = open_place(directory, StoreOptions(endpoint, region, allow_http))
    step = None if step_name is None else place.chosen_step(step_name, None)
    saves = place.saves(step)
    if step is not None and not saves:
        fail(f"step {step} is not committed in {directory}", USAGE)
    size = place.bytes_to_read(saves)
    started = time.perf_counter()
    with bytes_bar("reading", size) as tell:
        checked = place.check_digests(saves, threads, tell)
    seconds = time.perf_counter() - started
    findings = in_order([*reports.of_saves(checked), *place.beside(checked, step)])
    damage = sum(finding.is_damage for finding in findings)
    if as_json:
        emit(
            {
                "directory": str(directory),
                "saves": [report.to_json_dict() for report in place.reports(checked)],
                "findings": [finding.to_json_dict() for finding in findings],
                "read": {"bytes": size, "seconds": round(seconds, 3), "threads": threads},
            }
        )
    else:
        tables.print_saves(place.reports(checked))
        tables.print_findings(findings)
        rate = f", {decimal(int(size / seconds))}/s" if size else ""
        stderr().print(
            f"{counted(len(checked), 'save')}, {decimal(size)} read in {seconds:.1f} s{rate}; "
            f"{damage} damaged, {counted(len(findings) - damage, 'leftover')}"
        )
        for sentence in remedies.of_damaged_targets(place, checked):
            say(sentence)
    if damage:
        raise typer.Exit(DAMAGED)
