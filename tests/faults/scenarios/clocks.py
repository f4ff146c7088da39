"""Clocks that jump, and ranks that never save."""

from datetime import timedelta

from trainsync.api.protocol import SaveState
from trainsync.failpoints import POINTS, SAVE

from tests.faults.inject import At, kill_me
from tests.faults.obeying import Faulty, hosting, joined
from tests.faults.plan import Shape, draw
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.scenarios.common import end_all, go_on, start
from tests.faults.training import CLOCK, DEADLINE_SECONDS
from tests.faults.trial import Trial

_JUMPS = (1.0, 60.0, DEADLINE_SECONDS * 2, 86400.0 * 3650)


def _jump(trial: Trial) -> None:
    point = trial.point
    if point == "away_for_days":
        _away(trial)
        return
    plan = draw(trial.seed, split=False if point == "back_after_an_error" else None)
    seconds = trial.dice.choice(_JUMPS) * (1 if point == "forward" else -1)

    def jump() -> None:
        CLOCK.offset += timedelta(seconds=seconds)

    def fail_then_jump() -> None:
        jump()
        raise OSError("this commit fails once")

    write_hook: At | None = None
    monitor_hook: At | None = None
    if point == "back_after_an_error":
        monitor_hook = At("promoted", 1, fail_then_jump)
    else:
        at_write = trial.dice.random() < 0.5 and not plan.split
        phase = trial.dice.choice(POINTS[SAVE] if at_write else ("promoting", "manifest"))
        hook = At(phase, 1, jump)
        write_hook, monitor_hook = (hook, None) if at_write else (None, hook)

    def arm() -> None:
        for hook in (write_hook, monitor_hook):
            if hook is not None:
                hook.armed = True

    faulty = Faulty(
        write=write_hook,
        monitor=monitor_hook,
        arm=arm,
    )
    children = start(trial, trial.attempt(plan), plan, faulty, one_clock=True)
    trial.maybe_read()
    for child in children:
        child.tell("fault")
    for child in children:
        child.expect("saved")
    children[0].tell("outcomes")
    for kind, status in children[0].expect("outcomes").items():
        trial.note(f"{status.state} after a jump {'forward' if seconds > 0 else 'back'}")
        may = {SaveState.COMMITTED}
        if seconds > DEADLINE_SECONDS:
            may.add(SaveState.ABORTED)
        if status.state not in may:
            raise BrokenError(f"{kind} is {status.state} after {seconds:+g} s: {status.error}")
    go_on(children)
    end_all(children)
    trial.check_resumes(plan, last=())


def _away(trial: Trial) -> None:
    """All processes are killed after a complete save, and restarted after the deadline."""
    plan = draw(trial.seed, split=True)
    hook = At("promoting", 1, kill_me)
    faulty = Faulty(monitor=hook, arm=lambda: setattr(hook, "armed", True))
    children = start(trial, trial.attempt(plan), plan, faulty)
    for child in children:
        child.tell("fault")
    children[0].wait()
    children[1].expect("saved")
    children[1].kill()
    trial.check_resumes(plan, away=timedelta(seconds=DEADLINE_SECONDS * 10))


def _absent(trial: Trial) -> None:
    plan = draw(trial.seed, split=True, least_ranks=2)
    where = trial.attempt(plan)
    there = list(range(plan.ranks))
    absent = sorted(trial.dice.sample(there[1:], trial.dice.randint(1, plan.ranks - 1)))
    host = trial.child("host", hosting, where, plan, [r for r in there if r not in absent])
    missing = trial.child("absent", joined, where, plan, absent)
    for child in (host, missing):
        child.expect("history")
    trial.maybe_read()
    host.tell("fault")
    host.expect("saved")
    for word in ("await", "jump", "awaited"):
        host.tell(word)
    told = host.expect("awaited")
    for kind, text in told.items():
        parts = [f"{name}.{r}" for name in plan.written(plan.fault, kind) for r in absent]
        by_state_dict = plan.fault.shape is Shape.REUSE and "state dict of step" in text
        if not by_state_dict and not any(part in text for part in parts):
            raise BrokenError(f"{kind}: the abort names none of {parts}: {text}")
    go_on([host, missing])
    end_all([host, missing])
    trial.check_resumes(plan, last=())


SCENARIOS = (
    Scenario(
        name="clock_jump",
        broken="the clock of the monitor's host jumps by seconds to years amid a save",
        holds="only a jump beyond the deadline may abort, and only what is incomplete",
        points=("forward", "back", "back_after_an_error", "away_for_days"),
        trial=_jump,
    ),
    Scenario(
        name="rank_never_comes",
        broken="some ranks never save a step that the others save",
        holds="at the deadline it aborts, the error names who is missing, the next step commits",
        points=tuple(Shape),
        trial=_absent,
    ),
)
