"""Writers killed, or stopped for a while, at each phase of a save."""

import signal

from trainsync import failpoints
from trainsync.api.protocol import SaveState

from tests.faults.inject import At, kill_me, stop_me
from tests.faults.obeying import Faulty, hosting, joined
from tests.faults.plan import Plan, Shape, draw
from tests.faults.processes import BrokenError, Child
from tests.faults.scenario import Scenario
from tests.faults.training import Where
from tests.faults.trial import Trial

PHASES = failpoints.POINTS[failpoints.SAVE]
POINTS = tuple(f"{phase}/{shape}" for phase in PHASES for shape in Shape)


def _victims(trial: Trial, plan: Plan, *, spare: int = 0) -> list[int]:
    """Ranks of the process with the fault; never the first ``spare`` ranks."""
    ranks = range(spare, plan.ranks)
    return sorted(trial.dice.sample(ranks, trial.dice.randint(1, len(ranks))))


def _struck(trial: Trial, plan: Plan, phase: str, ranks: int, strike: object) -> Faulty:
    saves = sum(len(plan.written(plan.fault, kind)) for kind in plan.fault.shape.kinds)
    hook = At(phase, trial.dice.randint(1, saves * ranks), strike)  # type: ignore[arg-type]
    return Faulty(write=hook, arm=lambda: setattr(hook, "armed", True))


def _start(
    trial: Trial, where: Where, plan: Plan, victims: list[int], faulty: Faulty
) -> tuple[Child, Child | None]:
    """Start the process with the fault, and the other one if the plan has two; commit the
    history."""
    if plan.split:
        others = [rank for rank in range(plan.ranks) if rank not in victims]
        other = trial.child("host", hosting, where, plan, others)
        victim = trial.child("victim", joined, where, plan, victims, faulty)
        other.expect("history")
    else:
        other = None
        victim = trial.child("victim", hosting, where, plan, victims, faulty)
    victim.expect("history")
    trial.maybe_read()
    return victim, other


def _killed(trial: Trial) -> None:
    phase, _, shape = trial.point.partition("/")
    plan = draw(trial.seed, shape=Shape(shape))
    where = trial.attempt(plan)
    victims = _victims(trial, plan) if plan.split else list(range(plan.ranks))
    faulty = _struck(trial, plan, phase, len(victims), kill_me)
    victim, other = _start(trial, where, plan, victims, faulty)
    if other is not None:
        other.tell("fault")
    victim.tell("fault")
    ended, status = victim.listen()
    if ended == "saved" and phase == "told":  # occurs after the trainer has gone on
        ended, status = victim.listen()
    if (ended, status) != ("ended", -signal.SIGKILL):
        raise BrokenError(f"the writer was not killed at {phase}: it says {ended!r}, {status}")
    if other is not None:
        other.expect("saved")
        if trial.dice.random() < 0.5:
            other.kill()
        else:
            other.tell("end")
            if other.wait() != 0:
                raise BrokenError(f"the monitor's process ended with {other.status}")
    trial.check_resumes(plan)


def _stopped(trial: Trial) -> None:
    phase, _, shape = trial.point.partition("/")
    plan = draw(trial.seed, shape=Shape(shape), split=True, least_ranks=2)
    where = trial.attempt(plan)
    victims = _victims(trial, plan, spare=1)
    faulty = _struck(trial, plan, phase, len(victims), stop_me)
    victim, host = _start(trial, where, plan, victims, faulty)
    assert host is not None
    host.tell("fault")
    victim.tell("fault")
    if not victim.wait_stopped():
        raise BrokenError(f"the writer was not stopped at {phase}: it ended with {victim.status}")
    host.expect("saved")
    host.tell("jump")
    host.tell("outcomes")
    outcomes = host.expect("outcomes")
    open_still = [f"{s.kind} is {s.state}" for s in outcomes.values() if s.state not in _ENDED]
    if open_still:
        raise BrokenError(f"the deadline has passed, but {', '.join(open_still)}")
    victim.signal(signal.SIGCONT)
    victim.expect("saved")
    for child in (host, victim):
        child.tell("after")
    for child in (host, victim):
        child.expect("after")
        child.tell("end")
    for child in (victim, host):
        child.wait()
    aborted = [kind for kind, status in outcomes.items() if status.state is SaveState.ABORTED]
    trial.note("aborted" if aborted else "committed before the deadline")
    committed = trial.check(plan)
    for kind in aborted:
        if plan.fault.number in committed[kind]:
            raise BrokenError(f"{kind} {plan.fault.number} was aborted, and is committed")
    trial.check_resumes(plan, last=())


_ENDED = (SaveState.COMMITTED, SaveState.ABORTED)

SCENARIOS = (
    Scenario(
        name="writer_killed",
        broken="kill -9 of a writer at each phase of a save, of each kind of save",
        holds="the save commits if every receipt was on disk, else nothing of it",
        points=POINTS,
        trial=_killed,
        faults=len(PHASES),
    ),
    Scenario(
        name="writer_stopped",
        broken="SIGSTOP of a writer at each phase until the deadline has passed, then SIGCONT",
        holds="the save is aborted and stays so, whatever the writer then does; the next commits",
        points=POINTS,
        trial=_stopped,
    ),
)
