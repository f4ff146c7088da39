"""``trainsync checkpoints prune``."""

import time
from typing import Annotated

import typer
from rich.filesize import decimal

from trainsync.api.words import counted
from trainsync.cli.checkpoints import prune_plan
from trainsync.cli.checkpoints.prune_plan import PrunedStep
from trainsync.cli.options import AsJson, Directory, DryRun, open_run
from trainsync.cli.output import tables
from trainsync.cli.output.console import (
    REFUSED,
    can_ask,
    emit,
    fail,
    guarded,
    say,
    stderr,
    stdout,
)
from trainsync.storage.inspect.activity import sign_of_life
from trainsync.storage.inspect.repair import empty_trash
from trainsync.storage.inspect.saves import check_all_sizes
from trainsync.storage.layout import RunDirectory


@guarded
def prune(
    directory: Directory,
    keep: Annotated[int, typer.Option(min=1, help="Last steps of each kind that stay.")],
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also while a run seems to be at work here.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old steps, by the rule of the monitor's retention, and free their space.

    Of each kind the last KEEP stay, in the order of training; so does what a pointer names, what a
    reader has leased, what is being saved or was resumed from, and the newest save that is whole.
    A step vanishes at once, by a rename.
    """
    run = open_run(directory)
    saves = check_all_sizes(run)
    removals = prune_plan.measure(run, saves, prune_plan.choose(run, saves, keep))
    if not dry_run and not force and (sign := sign_of_life(run, time.time())) is not None:
        fail(
            f"a run seems to be at work in {directory} ({sign}); its monitor removes old steps by "
            "itself (spec.checkpoint.maxToKeep, TRAINSYNC_CHECKPOINT_MAX_TO_KEEP without a "
            "cluster). Use --force to prune all the same"
        )
    if not as_json:
        _print(removals)
    removed: list[PrunedStep] = []
    held: list[PrunedStep] = []
    if removals and not dry_run:
        _ask(removals, yes=yes)
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


def _print(removals: list[PrunedStep]) -> None:
    if not removals:
        stdout().print("nothing to remove")
        return
    table = tables.new_table()
    table.add_column("step", justify="right")
    table.add_column("kinds")
    table.add_column("size", justify="right")
    for removal in removals:
        kinds = ", ".join(kind.value for kind in removal.kinds)
        table.add_row(str(removal.step), kinds, decimal(removal.bytes))
    stdout().print(table)
    total = decimal(sum(removal.bytes for removal in removals))
    stdout().print(f"{counted(len(removals), 'step')} to remove, {total}")


def _ask(removals: list[PrunedStep], *, yes: bool) -> None:
    if yes:
        return
    if not can_ask():
        fail(
            "nothing was removed: the input is no terminal, so the question cannot be asked; "
            "give --yes"
        )
    if not typer.confirm(f"Remove {counted(len(removals), 'step')} for ever?", err=True):
        fail("nothing was removed")


def _remove(
    run: RunDirectory, removals: list[PrunedStep]
) -> tuple[list[PrunedStep], list[PrunedStep]]:
    """Steps that are gone, and steps that a reader holds by now."""
    removed: list[PrunedStep] = []
    held: list[PrunedStep] = []
    try:
        for removal in removals:
            (removed if prune_plan.remove(run, removal.step) else held).append(removal)
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
