"""``trainsync checkpoints repair``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from trainsync.api.protocol import SaveKind
from trainsync.cli.checkpoints.places import open_bucket, refuse_options
from trainsync.cli.checkpoints.remedies import JUDGED_BY_SIZE
from trainsync.cli.checkpoints.repair.actions import carry_out
from trainsync.cli.checkpoints.repair.store import repair_store
from trainsync.cli.options import (
    DEFAULT_THREADS,
    AllowHttp,
    AsJson,
    DirectoryOrUrl,
    DryRun,
    Endpoint,
    Region,
    Threads,
    open_run,
)
from trainsync.cli.output.console import REFUSED, emit, guarded, say, stdout
from trainsync.cli.output.progress import bytes_bar
from trainsync.storage.inspect import leftovers as leftovers
from trainsync.storage.inspect import repair as repairs
from trainsync.storage.inspect.activity import sign_of_life
from trainsync.storage.inspect.internal import in_internal, out_of_place
from trainsync.storage.inspect.repair import Action
from trainsync.storage.inspect.saves import check_all_sizes
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import address
from trainsync.storage.objects.opening import StoreOptions


@guarded
def repair(
    directory: DirectoryOrUrl,
    dry_run: DryRun = False,
    digest: Annotated[
        bool,
        typer.Option("--digest", help="Judge saves by their bytes, not sizes alone."),
    ] = False,
    threads: Threads = DEFAULT_THREADS,
    endpoint: Endpoint = None,
    region: Region = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Mend what a crash left, and say each thing that is done. A valid save is never touched.

    A pointer that dangles or names a damaged save is moved to the newest valid one; temporary
    files older than an hour and ended leases are removed; a step that a crash kept from its place
    is put there; the trash is emptied. With --digest, a newer save with changed bytes is set
    aside: its manifest is renamed, so that no attempt resumes from it. Exit code 3 when a pointer
    has nothing valid left to name: it stays as it is.

    In a store, saves with missing objects are set aside too, so that they can be copied again, and
    objects that no manifest names are removed after two days.
    """
    options = StoreOptions(endpoint, region, allow_http)
    if address.is_url(directory):
        bucket = open_bucket(directory, options)
        done, refused = repair_store(
            bucket, dry_run=dry_run, with_digest=digest, threads=threads, quiet=as_json
        )
    else:
        refuse_options(options)
        run = open_run(Path(directory))
        done, refused = _repair(
            run, dry_run=dry_run, with_digest=digest, threads=threads, quiet=as_json
        )
    if as_json:
        emit(
            {
                "directory": directory,
                "dryRun": dry_run,
                "actions": [action.to_json_dict() for action in done],
                "refused": list(refused),
            }
        )
    elif not done and not refused:
        stdout().print("nothing to mend")
    if not digest and not as_json:
        say(f"{JUDGED_BY_SIZE}; --digest reads their bytes, and takes as long as `verify`")
    for sentence in refused:
        say(sentence, style="red")
    if refused:
        raise typer.Exit(REFUSED)


def _repair(
    run: RunDirectory, *, dry_run: bool, with_digest: bool, threads: int, quiet: bool
) -> tuple[list[Action], tuple[str, ...]]:
    """What was done, and a sentence for each pointer that cannot be repaired."""
    done = []
    for action in _places(run):
        done += carry_out(action, dry_run=dry_run, quiet=quiet)
    # While a step is out of its place, the pointer that may name it cannot be judged.
    kinds = [kind for kind in SaveKind if kind is not SaveKind.STATE_DICT or not out_of_place(run)]
    with bytes_bar("reading", None) as tell:
        plan = repairs.plan_pointers(
            run, kinds=kinds, with_digest=with_digest, threads=threads, on_bytes=tell
        )
    for action in [*plan.actions, *_cleanup(run)]:
        done += carry_out(action, dry_run=dry_run, quiet=quiet)
    return done, plan.refused


def _places(run: RunDirectory) -> list[Action]:
    places = repairs.plan_places(run)
    if places and (sign := sign_of_life(run, time.time())) is not None:
        # Its monitor may be between the two renames at this moment.
        say(f"a run seems to be at work ({sign}): what it has put aside is left to it")
        return []
    return places


def _cleanup(run: RunDirectory) -> list[Action]:
    saves = check_all_sizes(run)
    findings = [
        *leftovers.in_root(run),
        *leftovers.in_steps(run, saves),
        *leftovers.in_staging(run),
        *in_internal(run),
    ]
    return repairs.plan_cleanup(run, findings, time.time())
