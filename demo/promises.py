"""Promises that a run with killed trainers must keep: pure."""

from __future__ import annotations

from dataclasses import dataclass

from demo.history import Fault, History

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
    """Result of `trainsync checkpoints verify` for the run's checkpoints."""

    whole: tuple[int, ...] = ()
    """Steps whose checkpoint matches its manifest."""
    problem: str = ""


def check(history: History, verified: Verification) -> list[Promise]:
    """All promises of the demo."""
    return [
        _complete(history),
        _one_new_job(history),
        _nothing_lost(history),
        _reward_rose(history),
        _probe_equal(history),
        _explorers_up_to_date(history),
        _all_verify(history, verified),
    ]


def _complete(history: History) -> Promise:
    last = history.last
    kept = last.phase == "Complete" and last.step is not None and last.step == last.total
    seen = f"phase {last.phase}, step {last.step} of {last.total}; {last.message}"
    return Promise("the run is Complete at its last step", kept, seen)


def _one_new_job(history: History) -> Promise:
    last = history.last
    after = {kill.fault: kill.after for kill in history.kills}
    kept = after.get(Fault.POD) is not None and (last.attempt, last.restarts) == (1, 1)
    seen = f"attempt {last.attempt}, {last.restarts} restarts"
    in_place = after.get(Fault.PROCESS)
    count = 0 if in_place is None else in_place.restarts_in_place
    kept &= in_place is not None and in_place.attempt == 0 and count == 1
    text = "a killed process restarts in its pod, and a killed pod costs one new job"
    return Promise(text, kept, f"{count} restarts in place, then {seen}")


def _nothing_lost(history: History) -> Promise:
    text = "no step is lost past the last commit"
    if len(history.kills) < len(Fault):
        done = f"{len(history.kills)} of {len(Fault)} kills were done"
        return Promise(text, False, done)
    kept, seen = True, []
    for kill in history.kills:
        resumed, committed = kill.resumed, kill.at.committed
        kept &= None not in (resumed, committed) and resumed == kill.before
        seen.append(
            f"{kill.fault.value} killed at step {kill.at.step} with {committed} committed;"
            f" {kill.before} was committed before trainers resumed from {resumed}"
        )
    return Promise(text, kept, ". ".join(seen))


def _reward_rose(history: History) -> Promise:
    steps = sorted(history.rewards)
    first = [history.rewards[step] for step in steps[:_WINDOW]]
    final = [history.rewards[step] for step in steps[-_WINDOW:]]
    text = f"the reward rises by {_REWARD_RISE} or more"
    if len(steps) < 2 * _WINDOW:
        return Promise(text, False, f"only {len(steps)} steps were seen")
    start, end = sum(first) / _WINDOW, sum(final) / _WINDOW
    return Promise(text, end - start >= _REWARD_RISE, f"{start:.3f} → {end:.3f}")


def _probe_equal(history: History) -> Promise:
    text = "explorers compute the trainer's log-probabilities at equal version"
    worst = max(history.probe_differences.values(), default=None)
    if worst is None or history.probe_tolerance is None:
        return Promise(text, False, "the run reported no probe")
    seen = (
        f"largest difference {worst:.1e} in {len(history.probe_differences)} reports,"
        f" allowed {history.probe_tolerance:.1e}"
    )
    if history.last.step not in history.probe_differences:
        # The status leaves out a NaN probe.
        return Promise(text, False, f"{seen}, and none at the last step")
    return Promise(text, worst <= history.probe_tolerance, seen)


def _explorers_up_to_date(history: History) -> Promise:
    last = history.last
    kept = last.explorers > 0 and last.lag == 0
    seen = f"{last.explorers} explorers, version {last.version}, lag {last.lag}"
    return Promise("every explorer ends with the last weights", kept, seen)


def _all_verify(history: History, verified: Verification) -> Promise:
    text = "every committed checkpoint verifies"
    if verified.problem:
        return Promise(text, False, verified.problem)
    steps = ", ".join(str(step) for step in verified.whole)
    seen = f"{len(history.commits)} commits were seen; kept and whole are those of steps {steps}"
    kept = history.last.committed in verified.whole and len(history.commits) >= 3
    return Promise(text, kept, seen)
