"""``trainsync checkpoints prune``."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from trainsync.api.words import counted
from trainsync.cli.checkpoints.places import open_bucket, refuse_options
from trainsync.cli.checkpoints.prune import plan, question, store
from trainsync.cli.checkpoints.prune.plan import PrunedStep
from trainsync.cli.options import (
    AllowHttp,
    AsJson,
    DirectoryOrUrl,
    DryRun,
    Endpoint,
    Region,
    open_run,
)
from trainsync.cli.output.console import REFUSED, emit, fail, guarded, say, stderr
from trainsync.storage.inspect.activity import sign_of_life
from trainsync.storage.inspect.repair import empty_trash
from trainsync.storage.inspect.saves import check_all_sizes
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import address
from trainsync.storage.objects.opening import StoreOptions


@guarded
def prune(
    directory: DirectoryOrUrl,
    keep: Annotated[int, typer.Option(min=1, help="Last steps of each kind that stay.")],
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also while a run seems to be at work here.")
    ] = False,
    endpoint: Endpoint = None,
    region: Region = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Remove old steps, by the rule of the monitor's retention, and free their space.

    Of each kind the last KEEP stay, in the order of training; so does what a pointer names, what a
    reader has leased, what is being saved or was resumed from, and the newest save that is whole.
    A step vanishes at once, by a rename. What it frees is more than the size that `ls` shows: its
    manifest, too, and files in its folder that no manifest lists.

    In a store, a step vanishes with its manifest; objects that no manifest names, older than two
    days, go too: a copy that was cut off has left them.
    """
    options = StoreOptions(endpoint, region, allow_http)
    if address.is_url(directory):
        asked = store.Asked(keep, dry_run, yes, as_json)
        store.prune_store(open_bucket(directory, options), asked)
        return
    refuse_options(options)
    run = open_run(Path(directory))
    saves = check_all_sizes(run)
    removals = plan.measure(run, saves, plan.choose(run, saves, keep))
    if not dry_run and not force and (sign := sign_of_life(run, time.time())) is not None:
        fail(
            f"a run seems to be at work in {directory} ({sign}); its monitor removes old steps by "
            "itself (spec.checkpoint.maxToKeep, TRAINSYNC_CHECKPOINT_MAX_TO_KEEP without a "
            "cluster). Use --force to prune all the same"
        )
    if not as_json:
        question.print_removals(removals)
    removed: list[PrunedStep] = []
    held: list[PrunedStep] = []
    if removals and not dry_run:
        question.confirm(f"Remove {counted(len(removals), 'step')} for ever?", yes=yes)
        removed, held = _remove(run, removals)
    if as_json:
        gone = {removal.step for removal in removed} | {r.step for r in removals if dry_run}
        emit(
            {
                "directory": str(directory),
                "keep": keep,
                "dryRun": dry_run,
                "removed": [r.to_json_dict() for r in (removals if dry_run else removed)],
                "held": [removal.step for removal in held],
                "kept": sorted({save.step for save in saves} - gone),
            }
        )
    if held:
        steps = ", ".join(str(removal.step) for removal in held)
        fail(f"not removed, since a reader or a pointer holds them by now: steps {steps}", REFUSED)


def _remove(
    run: RunDirectory, removals: list[PrunedStep]
) -> tuple[list[PrunedStep], list[PrunedStep]]:
    """Steps that are gone, and steps that a reader holds by now."""
    removed: list[PrunedStep] = []
    held: list[PrunedStep] = []
    try:
        for removal in removals:
            (removed if plan.remove(run, removal.step) else held).append(removal)
        with stderr().status("freeing space"):
            empty_trash(run)
    except BaseException:
        if removed:
            steps = ", ".join(str(removal.step) for removal in removed)
            say(f"stopped early; steps removed: {steps}. `repair` frees what is left in the trash")
        raise
    freed = decimal(sum(removal.bytes for removal in removed))
    say(f"{counted(len(removed), 'step')} removed, {freed} freed")
    return removed, held
