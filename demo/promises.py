"""Promises that a run with one killed trainer must keep: pure."""

from __future__ import annotations

from dataclasses import dataclass

from demo.story import Story

_REWARD_RISE = 0.2
_WINDOW = 5


@dataclass(frozen=True)
class Promise:
    """One promise and whether it was kept."""

    text: str
    kept: bool
    seen: str


@dataclass(frozen=True)
class Verification:
    """Result of `trainsync checkpoints verify` for the run's directory on the volume."""

    whole: tuple[int, ...] = ()
    """Steps whose checkpoint matches its manifest."""
    problem: str = ""


def check(story: Story, verified: Verification) -> list[Promise]:
    """All promises of the demo."""
    return [
        _complete(story),
        _one_restart(story),
        _nothing_lost(story),
        _reward_rose(story),
        _probe_equal(story),
        _explorers_up_to_date(story),
        _all_verify(story, verified),
    ]


def _complete(story: Story) -> Promise:
    last = story.last
    kept = last.phase == "Complete" and last.step is not None and last.step == last.total
    seen = f"phase {last.phase}, step {last.step} of {last.total}; {last.message}"
    return Promise("the run is Complete at its last step", kept, seen)


def _one_restart(story: Story) -> Promise:
    last = story.last
    kept = story.killed_at is not None and last.attempt == 1 and last.restarts == 1
    seen = f"attempt {last.attempt}, {last.restarts} restarts"
    return Promise("one killed trainer costs one restart", kept, seen)


def _nothing_lost(story: Story) -> Promise:
    text = "no step is lost past the last commit"
    if story.killed_at is None or story.killed_at.committed is None:
        return Promise(text, False, "no trainer was killed")
    before, resumed = story.committed_before_resume, story.resumed_step
    kept = resumed is not None and resumed == before and resumed >= story.killed_at.committed
    seen = (
        f"killed at step {story.killed_at.step} with {story.killed_at.committed} committed;"
        f" {before} was committed before the restart, which resumed from {resumed}"
    )
    return Promise(text, kept, seen)


def _reward_rose(story: Story) -> Promise:
    steps = sorted(story.rewards)
    first = [story.rewards[step] for step in steps[:_WINDOW]]
    final = [story.rewards[step] for step in steps[-_WINDOW:]]
    text = f"the reward rises by {_REWARD_RISE} or more"
    if len(steps) < 2 * _WINDOW:
        return Promise(text, False, f"only {len(steps)} steps were seen")
    start, end = sum(first) / _WINDOW, sum(final) / _WINDOW
    return Promise(text, end - start >= _REWARD_RISE, f"{start:.3f} → {end:.3f}")


def _probe_equal(story: Story) -> Promise:
    text = "explorers compute the trainer's log-probabilities at equal version"
    worst = max(story.probe_differences.values(), default=None)
    if worst is None or story.probe_tolerance is None:
        return Promise(text, False, "the run reported no probe")
    seen = (
        f"largest difference {worst:.1e} in {len(story.probe_differences)} reports,"
        f" allowed {story.probe_tolerance:.1e}"
    )
    if story.last.step not in story.probe_differences:
        # The status leaves out a NaN probe.
        return Promise(text, False, f"{seen}, and none at the last step")
    return Promise(text, worst <= story.probe_tolerance, seen)


def _explorers_up_to_date(story: Story) -> Promise:
    last = story.last
    kept = last.explorers > 0 and last.lag == 0
    seen = f"{last.explorers} explorers, version {last.version}, lag {last.lag}"
    return Promise("every explorer ends with the last weights", kept, seen)


def _all_verify(story: Story, verified: Verification) -> Promise:
    text = "every committed checkpoint on the volume verifies"
    if verified.problem:
        return Promise(text, False, verified.problem)
    steps = ", ".join(str(step) for step in verified.whole)
    seen = f"{len(story.commits)} commits were seen; kept and whole are those of steps {steps}"
    kept = story.last.committed in verified.whole and len(story.commits) >= 3
    return Promise(text, kept, seen)
