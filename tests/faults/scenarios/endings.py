"""SIGTERM with a grace period, for trainers."""

import signal
import time
from functools import partial

from trainsync import failpoints
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.runtime.stop.shutdown import EXIT_CODE, GracefulShutdown
from trainsync.storage.saves import receipts

from tests.faults.inject import At, Slow
from tests.faults.obeying import hosting
from tests.faults.plan import Plan, draw
from tests.faults.processes import BrokenError, Line
from tests.faults.scenario import Scenario
from tests.faults.training import Trainer, Where, host, join
from tests.faults.trial import Trial

_SHORT_SECONDS = 4.0  # a quarter of it is left to tell of what is not written
_LONG_SECONDS = 15.0
_STUCK_SECONDS = 60.0
_SPARE_SECONDS = 5.0
"""Tolerated delay of a process's end on a busy machine."""


def _terminated_trainer(line: Line, where: Where, plan: Plan, point: str, hook: At | Slow) -> None:
    client = join(where) if plan.split else host(where, plan)
    failpoints.enable(failpoints.SAVE, hook)
    trainer = Trainer(where, plan, client, range(plan.ranks))
    trainer.train(plan.history)
    line.say("history")
    line.hear()
    savings = tuple(trainer.coordinators.values())
    grace = _SHORT_SECONDS if point in ("out_of_time", "stuck_loop") else _LONG_SECONDS
    with GracefulShutdown(savings, lambda _: client.close(), grace_seconds=grace) as shutdown:
        line.say("armed")
        hook.armed = True
        trainer.save(plan.fault)
        line.say("saved")
        while point == "stuck_loop" or not shutdown.requested:
            time.sleep(0.002)


def _terminated(trial: Trial) -> None:
    point = trial.point
    plan = draw(trial.seed)
    where = trial.attempt(plan)
    if point == "out_of_time":
        phase = trial.dice.choice(("opened", "written", "fsynced", "renamed"))
        hook: At | Slow = At(phase, 1, partial(time.sleep, _STUCK_SECONDS))
    else:
        hook = Slow(trial.seed, 0.03)
    monitor = trial.child("host", hosting, where, plan, []) if plan.split else None
    trainer = trial.child("trainer", _terminated_trainer, where, plan, point, hook)
    trainer.expect("history")
    trial.maybe_read()
    trainer.tell("fault")
    trainer.expect("armed")
    if point == "out_of_time":
        trainer.expect("saved")
    time.sleep(trial.dice.random() * 0.08)
    started = time.monotonic()
    trainer.signal(signal.SIGTERM)
    ends = {EXIT_CODE}
    if point == "twice":
        time.sleep(trial.dice.random() * 0.01)
        trainer.signal(signal.SIGTERM)
        ends.add(-signal.SIGTERM)
    status = trainer.wait(60)
    seconds = time.monotonic() - started
    if status not in ends:
        raise BrokenError(f"the trainer ended with {status}, not with {EXIT_CODE}")
    grace = _LONG_SECONDS if point == "flushed" else _SHORT_SECONDS
    if seconds > grace + _SPARE_SECONDS:
        raise BrokenError(
            f"the trainer ended {seconds:.1f} s after SIGTERM, {grace:g} s were given"
        )
    if point == "out_of_time":
        _check_reported(trial, plan, where)
    if monitor is not None:
        monitor.tell("end")
        monitor.wait()
    if point == "flushed":
        _check_committed(trial, plan, where)
    trial.check_resumes(plan)


def _check_committed(trial: Trial, plan: Plan, where: Where) -> None:
    owner = where.owner
    for kind in plan.fault.shape.kinds:
        save = trial.run.save(owner.attempt, owner.incarnation, kind, plan.fault.number)
        outcome = receipts.read_outcome(save)
        if outcome is None or outcome.manifest_digest is None:
            raise BrokenError(f"{kind} was begun before SIGTERM and is not committed: {outcome}")


def _check_reported(trial: Trial, plan: Plan, where: Where) -> None:
    """Check that unwritten saves are reported as failed, so that no client waits for the
    deadline."""
    client = join(where)
    states: dict[SaveKind, SaveState] = {}
    for kind in plan.fault.shape.kinds:
        save = trial.run.save(where.owner.attempt, where.owner.incarnation, kind, plan.fault.number)
        wait = 10.0 if plan.split and not list(save.receipts.glob("*.failed.json")) else 0.0
        states[kind] = client.save_status(kind, plan.fault.number, wait).state
        failed = states[kind] is SaveState.ABORTED or list(save.receipts.glob("*.failed.json"))
        if failed:
            return
    raise BrokenError(f"a save was cut short by SIGTERM, and nobody was told: {states}")


SCENARIOS = (
    Scenario(
        name="trainer_terminated",
        broken="SIGTERM amid a save: time enough, too little, a loop that hangs, a second SIGTERM",
        holds="what was begun commits, or is reported as failed; 143 within the grace period",
        points=("flushed", "out_of_time", "stuck_loop", "twice"),
        trial=_terminated,
    ),
)
