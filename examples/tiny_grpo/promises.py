"""Promises that a run with one killed trainer must keep, checked by its history and directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, committed_steps, read_manifest

from tiny_grpo.history import Started, Step
from tiny_grpo.probes import PROBE_TOLERANCE

_REWARD_RISE: Final = 0.2
_WINDOW: Final = 5


@dataclass(frozen=True)
class Promise:
    """One promise, whether it was kept, and the observed facts."""

    text: str
    kept: bool
    seen: str


@dataclass(frozen=True)
class Kill:
    """A trainer was killed; ``committed`` is the newest committed step after all processes died."""

    step: int
    committed: int


def check(
    records: Sequence[Started | Step], directory: Path, total: int, kill: Kill | None
) -> list[Promise]:
    """All promises.

    Args:
        records: The whole history.
        directory: The run's directory.
        total: Steps that the run should have.
        kill: None when the run ended before the kill.
    """
    starts = [record for record in records if isinstance(record, Started)]
    steps = [record for record in records if isinstance(record, Step)]
    return [
        _complete(steps, directory, total),
        _nothing_lost(starts, steps, total, kill),
        _repeated_steps_are_equal(steps),
        _probes_are_equal(steps),
        _reward_rises(steps),
        _all_verify(directory),
    ]


def _complete(steps: list[Step], directory: Path, total: int) -> Promise:
    committed = committed_steps(RunDirectory(directory), SaveKind.CHECKPOINT)
    last = steps[-1].step if steps else 0
    newest = committed[-1] if committed else None
    return Promise(
        "the run ends at its last step, and that is committed",
        last == newest == total,
        f"last step {last} of {total}, newest commit {newest}",
    )


def _nothing_lost(
    starts: list[Started], steps: list[Step], total: int, kill: Kill | None
) -> Promise:
    text = "no step is lost past the last commit"
    if kill is None or len(starts) != 2:
        return Promise(text, False, f"{len(starts)} attempts, expected 2: one killed, one resumed")
    resumed = starts[1].step
    # The next attempt commits a save whose files were all on disk when the trainer died.
    kept = kill.committed <= resumed <= kill.step
    first = [step.step for step in steps if step.attempt == starts[0].attempt]
    second = [step.step for step in steps if step.attempt == starts[1].attempt]
    kept &= first == list(range(1, kill.step + 1)) and second == list(range(resumed + 1, total + 1))
    return Promise(
        text,
        kept,
        f"killed after step {kill.step} with {kill.committed} committed, resumed after {resumed}",
    )


def _repeated_steps_are_equal(steps: list[Step]) -> Promise:
    losses: dict[int, set[float]] = {}
    for step in steps:
        losses.setdefault(step.step, set()).add(step.metrics["loss"])
    repeated = len(steps) - len(losses)
    unequal = sorted(step for step, values in losses.items() if len(values) > 1)
    return Promise(
        "steps that were done again have the same loss, bit for bit",
        not unequal,
        f"{repeated} steps done again" + (f", unequal: {unequal}" if unequal else ", all equal"),
    )


def _probes_are_equal(steps: list[Step]) -> Promise:
    text = "explorers compute the trainer's log-probabilities at equal version"
    worst = max((step.metrics["probe_max_abs_diff"] for step in steps), default=None)
    if worst is None:
        return Promise(text, False, "no probe was compared")
    seen = f"largest difference {worst:.1e} in {len(steps)} steps, allowed {PROBE_TOLERANCE:.0e}"
    return Promise(text, worst <= PROBE_TOLERANCE, seen)


def _reward_rises(steps: list[Step]) -> Promise:
    text = f"the reward rises by {_REWARD_RISE} or more"
    rewards = {step.step: step.metrics["reward"] for step in steps}
    values = [rewards[step] for step in sorted(rewards)]
    if len(values) < 2 * _WINDOW:
        return Promise(text, False, f"only {len(values)} steps were taken")
    before, after = sum(values[:_WINDOW]) / _WINDOW, sum(values[-_WINDOW:]) / _WINDOW
    return Promise(text, after - before >= _REWARD_RISE, f"{before:.3f} → {after:.3f}")


def _all_verify(directory: Path) -> Promise:
    run = RunDirectory(directory)
    steps = committed_steps(run, SaveKind.CHECKPOINT)
    files = 0
    problems = []
    for step in steps:
        try:
            manifest = read_manifest(run, SaveKind.CHECKPOINT, step).manifest
            check_manifest(run, manifest, with_digest=True)
            files += len(manifest.files)
        except (OSError, StorageError) as error:
            problems.append(str(error))
    return Promise(
        "every committed checkpoint verifies, file by file and digest by digest",
        len(steps) >= 3 and not problems,
        f"{len(steps)} checkpoints, {files} files" + "".join(f"; {text}" for text in problems),
    )
