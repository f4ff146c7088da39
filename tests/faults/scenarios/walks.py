"""A fault at each disk call of a job in turn: kill -9 before and after the call, EIO, ENOSPC."""

import json
import random
from typing import Final

from trainsync.api.protocol import SaveKind, SaveState

from tests.faults.disk import Act, How, Strike
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.trial import Trial
from tests.faults.walking import (
    LAST,
    PLAN,
    SOUND,
    STEPS,
    DeadError,
    Job,
    RefusedError,
    Saved,
    enumerable,
)

_LASTS_SECONDS: Final = 0.4
"""Longer than the monitor's retries of a save."""

_PARTS: Final = (
    ("removal", "/trash"),
    ("claim", "/claims"),
    ("resume", "RESUME.json"),
    ("registration", "REGISTRATION.json"),
    ("outcome", "COMMITTED.json"),
    ("outcome", "ABORTED.json"),
    ("pointer", "latest_"),
    ("manifest", "MANIFEST"),
    ("superseding", "/superseding"),
    ("receipt", "/receipts"),
    ("lock", ".lock"),
    ("promotion", " to global_step_"),
    ("function", "/work"),
    ("shard", "/files"),
)


_OF_TRAINERS: Final = frozenset({"registration", "shard", "function", "receipt"})
_OF_MONITOR: Final = frozenset({"retention", *(name for name, _ in _PARTS)}) - _OF_TRAINERS
_PARTS_OF: Final = {
    "job": _OF_TRAINERS | _OF_MONITOR,
    "monitor": _OF_MONITOR,
    "ranks": _OF_TRAINERS,
}


def part(act: Act) -> str:
    """The part of the protocol to which the call belongs."""
    if act.place.startswith("global_step_"):
        if act.operation == "rename" and "/trash" in act.place:
            return "retention"
        return "manifest" if "MANIFEST" in act.place else "promotion"
    return next((name for name, place in _PARTS if place in act.place), "directory")


def calls(trial: Trial, role: str) -> list[Act]:
    """The calls of a job without a fault; recorded once for all trials of this run."""
    known = trial.directory.parent / f"calls-of-{role}.json"
    if not known.exists():
        directory = trial.directory / "undisturbed"
        with Trial(trial.seed, directory, trial.point) as other:
            job = Job(other, role, None, restarts=False)
            job.begin()
            _check(job.train(), struck=False)
            found = enumerable(job.acts(role))  # the last step follows an error
            job.after()
            job.end()
        if lacks := _PARTS_OF[role] - {part(act) for act in found}:
            raise BrokenError(f"an undisturbed {role} never does: {', '.join(sorted(lacks))}")
        draft = directory / "calls.json"
        draft.write_text(json.dumps(found))
        draft.replace(known)
    return [Act(*one) for one in json.loads(known.read_text())]


def _walk(trial: Trial) -> None:
    role, _, name = trial.point.partition("/")
    how = How(name)
    possible = [act for act in calls(trial, role) if how.may_strike(act)]
    random.Random("walk").shuffle(possible)  # so that a few trials cover all parts
    act = possible[trial.seed // len(_POINTS[how]) % len(possible)]
    trial.note(f"{trial.point}: {len(possible)} calls")
    trial.note(f"struck: {part(act)}")
    (trial.directory / "struck.txt").write_text(f"{how} at {act}\n")  # kept after a broken promise
    strike = Strike(how, act, _LASTS_SECONDS if how.lasts else 0.0)
    job = Job(trial, role, strike, restarts=trial.dice.random() < 0.5)
    try:
        job.begin()
        saved = job.train()
        if not how.kills:
            struck = job.heal()
            _check(saved, struck)
            trial.note("a call failed" if struck else "the call did not come")
        elif job.restarted:
            _check(saved, struck=False)
        job.after()
        job.end()
    except RefusedError as error:
        if how.kills:
            raise BrokenError(f"the attempt could not begin: {error}") from error
        trial.note("the attempt could not begin")
    except DeadError as error:
        if not how.kills:
            raise BrokenError(f"{error} was killed by nobody") from error
    else:
        if how.kills:
            trial.note("the next monitor took over" if job.restarted else "the call did not come")
    job.kill()
    trial.check_resumes(SOUND, last=(*STEPS, LAST))


def _check(saved: list[Saved], struck: bool) -> None:
    """Check that every save has ended, and with success unless the fault may have aborted it."""
    for one in saved:
        fails = one.step == PLAN.failing
        for kind, state in one.ended.items():
            aborts = fails and kind is SaveKind.CHECKPOINT
            wanted = SaveState.ABORTED if aborts else SaveState.COMMITTED
            may = {wanted} | ({SaveState.ABORTED} if struck else set())
            if state not in may:
                raise BrokenError(f"{kind} {one.step} is {state}, not {wanted}")
        if one.failed and not struck:
            raise BrokenError(f"step {one.step} failed: {one.failed}")


_KILLS: Final = (
    "monitor/killed_before",
    "monitor/killed_after",
    "ranks/killed_before",
    "ranks/killed_after",
)
_ONCE: Final = ("job/eio_once", "job/enospc_once")
_LASTING: Final = (
    "monitor/eio_lasting",
    "monitor/enospc_lasting",
    "ranks/eio_lasting",
    "ranks/enospc_lasting",
)

_POINTS: Final = {
    How(point.partition("/")[2]): points for points in (_KILLS, _ONCE, _LASTING) for point in points
}

# `faults`: 200 trials of each part cover every call at least once.
SCENARIOS = (
    Scenario(
        name="disk_call_killed",
        broken="kill -9 before and after each call that changes the disk, of trainer and monitor",
        holds="the next monitor, or the next attempt, goes on from what was complete",
        points=_KILLS,
        trial=_walk,
        faults=5,
    ),
    Scenario(
        name="disk_error",
        broken="EIO or ENOSPC, once, at each call that changes the disk",
        holds="each save commits or aborts; the same attempt goes on, or the next if it was none",
        points=_ONCE,
        trial=_walk,
        faults=4,
    ),
    Scenario(
        name="disk_error_lasting",
        broken="the same from each call on, for the trainer alone or the monitor alone",
        holds="the same when the disk is well again",
        points=_LASTING,
        trial=_walk,
        faults=5,
    ),
)
