"""Monitors killed at each phase of a commit by kill -9."""

import signal
from dataclasses import replace
from typing import Final

from trainsync.api.protocol import SaveState
from trainsync.failpoints import POINTS, SAVE

from tests.faults.inject import At, kill_me
from tests.faults.obeying import Faulty, hosting, joined
from tests.faults.plan import STRIDE, Plan, Shape, Step, draw
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.trial import Trial

PHASES: Final = (
    "promoting",
    "promoted",
    "manifest",
    "pointing",
    "pointer",
    "retention",
    "cleaned",
    "aborting",
)
_POINTS: Final = tuple(f"{phase}/{shape}" for phase in PHASES for shape in Shape)


class _FailingWriteError(OSError):
    """The injected write error that makes the save abort."""


def _fail() -> None:
    raise _FailingWriteError("this write fails, so that the save is aborted")


def _killed(trial: Trial) -> None:
    phase, _, shape = trial.point.partition("/")
    plan = draw(trial.seed, shape=Shape(shape), split=True)
    if phase == "retention" and plan.keep is None:
        plan = plan.keeping(1)
    if phase == "aborting":
        # The monitor never hears of a save that fails before its registration.
        plan = replace(plan, register_first=True)
    where = trial.attempt(plan)
    at_commit = At(phase, _nth(trial, plan, phase), kill_me)
    # Nothing is aborted unless a writer fails.
    amid = trial.dice.choice([p for p in POINTS[SAVE] if p not in ("told", "receipt")])
    at_write = At(amid, 1, _fail)
    writers = Faulty(
        write=at_write,
        arm=lambda: setattr(at_write, "armed", phase == "aborting"),
    )
    monitor = Faulty(monitor=at_commit, arm=lambda: setattr(at_commit, "armed", True))
    victim = trial.child("monitor", hosting, where, plan, [], monitor)
    ranks = trial.child("ranks", joined, where, plan, list(range(plan.ranks)), writers)
    for child in (victim, ranks):
        child.expect("history")
    trial.maybe_read()
    victim.tell("fault")  # only arms the hook: this process has no ranks
    said, value = victim.listen()
    if said not in ("saved", "ended"):  # the phase may belong to the cleanup after the history
        raise BrokenError(f"the monitor said {said!r}: {value}")
    ranks.tell("fault")
    if victim.wait() != -signal.SIGKILL:
        raise BrokenError(f"the monitor was not killed at {phase}: it ended with {victim.status}")
    ranks.expect("saved")
    trial.check(plan)
    if trial.dice.random() < 0.4:
        ranks.kill()
        trial.note("the next attempt took over")
        trial.check_resumes(plan)
        return
    trial.note("the next monitor took over")
    again = trial.child("next monitor", hosting, where, plan.without_history(), [])
    again.expect("history")
    ranks.tell("outcomes")
    outcomes = ranks.expect("outcomes")
    wanted = (
        {SaveState.ABORTED, SaveState.COMMITTED} if phase == "aborting" else {SaveState.COMMITTED}
    )
    for kind, status in outcomes.items():
        if status.state not in wanted:
            raise BrokenError(
                f"{kind} {plan.fault.number} is {status.state} under the next monitor: "
                f"{status.error}"
            )
    for child in (again, ranks):
        child.tell("after")
        child.expect("after")
    for child in (ranks, again):
        child.tell("end")
        if child.wait() != 0:
            raise BrokenError(f"{child.name} ended with {child.status}")
    trial.check_resumes(plan, last=())


def _killed_superseding(trial: Trial) -> None:
    plan = draw(trial.seed, shape=Shape.REUSE, split=False).keeping(trial.dice.choice((None, 1)))
    first, again = Step(STRIDE, Shape.CHECKPOINT), Step(2 * STRIDE, Shape.REUSE)
    older = replace(plan, history=(first, Step(again.number, Shape.STATE_DICT)))
    where = trial.attempt(older)
    ranks = list(range(plan.ranks))
    job = trial.child("older attempt", hosting, where, older, ranks)
    job.expect("history")
    job.tell("end")
    job.wait()
    trial.check(plan)
    where = trial.attempt(plan)
    trial.steps[1, again.number] = again
    hook = At(trial.point, 1, kill_me)
    faulty = Faulty(monitor=hook, arm=lambda: setattr(hook, "armed", True))
    newer = replace(plan, history=(), fault=again)
    job = trial.child("newer attempt", hosting, where, newer, ranks, faulty)
    job.expect("history")
    job.tell("fault")
    if job.wait() != -signal.SIGKILL:
        raise BrokenError(f"the monitor was not killed at {trial.point}: it ended, {job.status}")
    trial.check_resumes(newer)


def _nth(trial: Trial, plan: Plan, phase: str) -> int:
    """The most occurrences of the phase in the step of the fault."""
    saves = len(plan.fault.shape.kinds)
    if phase == "promoting":
        files = sum(len(plan.participants(plan.fault, kind)) for kind in plan.fault.shape.kinds)
        return trial.dice.randint(1, files)
    if phase in ("promoted", "manifest", "cleaned"):
        return trial.dice.randint(1, saves)
    return 1


SCENARIOS = (
    Scenario(
        name="monitor_killed",
        broken="kill -9 of the monitor at each phase of a commit, and amid an abort",
        holds="the next monitor, or the next attempt, finishes the commit",
        points=_POINTS,
        trial=_killed,
        faults=len(PHASES),
    ),
    Scenario(
        name="superseding_killed",
        broken="kill -9 of the monitor while newer weights take the place of an older attempt's",
        holds="one of the two is there as a whole, and the next attempt goes on",
        points=("promoting", "promoted", "superseding", "manifest", "pointer", "cleaned"),
        trial=_killed_superseding,
    ),
)
