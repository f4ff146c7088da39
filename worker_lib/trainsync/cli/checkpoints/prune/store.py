"""``trainsync checkpoints prune`` of a store."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from trainsync.api.words import counted
from trainsync.cli.checkpoints.prune import question
from trainsync.cli.checkpoints.prune.plan import PrunedStep
from trainsync.cli.output.console import REFUSED, emit, fail, say, stdout
from trainsync.storage.objects import inspecting, removal
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.inspecting import StoredSave
from trainsync.storage.objects.removal import Orphans


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    keep: int
    dry_run: bool
    yes: bool
    as_json: bool


def prune_store(bucket: ObjectBucket, asked: Asked) -> None:
    """Remove old steps, and objects of copies that were cut off."""
    found = inspecting.check_all_sizes(bucket)
    removals = _measure(found, removal.choose(bucket, found, asked.keep))
    orphans = [] if asked.dry_run else removal.orphans(bucket)
    if not asked.as_json:
        question.print_removals(removals)
        for one in orphans:
            stdout().print(
                f"{one.folder}: {decimal(one.bytes)} of a copy that was cut off",
                markup=False,
                soft_wrap=True,
            )
    removed: list[PrunedStep] = []
    held: list[PrunedStep] = []
    if (removals or orphans) and not asked.dry_run:
        question.confirm(_question(removals, orphans), yes=asked.yes)
        removed, held = _remove(bucket, removals, found)
        removal.remove_orphans(bucket, orphans)
    if asked.as_json:
        told = removals if asked.dry_run else removed
        gone = {one.step for one in told}
        emit(
            {
                "directory": bucket.name,
                "keep": asked.keep,
                "dryRun": asked.dry_run,
                "removed": [one.to_json_dict() for one in told],
                "held": [one.step for one in held],
                "kept": sorted({one.save.step for one in found} - gone),
                "orphans": [one.to_json_dict() for one in orphans],
            }
        )
    if held:
        steps = ", ".join(str(one.step) for one in held)
        fail(f"not removed, since they are named by a pointer or were replaced: {steps}", REFUSED)


def _question(removals: Sequence[PrunedStep], orphans: Sequence[Orphans]) -> str:
    parts = [counted(len(removals), "step")] if removals else []
    parts += ["what was cut off"] if orphans else []
    return f"Remove {' and '.join(parts)} for ever?"


def _measure(found: Sequence[StoredSave], steps: Sequence[int]) -> list[PrunedStep]:
    measured = []
    for step in steps:
        saves = [one.save for one in found if one.save.step == step]
        size = sum(entry.bytes for save in saves for entry in save.files)
        measured.append(PrunedStep(step, tuple(save.kind for save in saves), size))
    return measured


def _remove(
    bucket: ObjectBucket, removals: Sequence[PrunedStep], found: Sequence[StoredSave]
) -> tuple[list[PrunedStep], list[PrunedStep]]:
    """Steps that are gone, and steps that stay."""
    removed: list[PrunedStep] = []
    held: list[PrunedStep] = []
    try:
        for one in removals:
            (removed if removal.remove(bucket, one.step, found) else held).append(one)
    except BaseException:
        if removed:
            steps = ", ".join(str(one.step) for one in removed)
            say(f"stopped early; steps removed: {steps}. Objects that are left go with a later one")
        raise
    freed = decimal(sum(one.bytes for one in removed))
    say(f"{counted(len(removed), 'step')} removed, {freed} freed")
    return removed, held
