"""Pods that are taken: the trainers are asked to save in time, and killed."""

import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from trainsync import failpoints
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.api.status import StopReason, StopRequest, StopSave, StopSaveState
from trainsync.monitor.ledger.saves import Owner
from trainsync.runtime.context import RunContext

from tests.faults.cluster import Cluster
from tests.faults.inject import Slow
from tests.faults.kube import CLUSTER, Place
from tests.faults.plan import Plan, Shape, Step, draw
from tests.faults.processes import SECONDS, BrokenError, Child, Line
from tests.faults.scenario import Scenario
from tests.faults.training import Trainer, Where
from tests.faults.trial import Trial
from tests.unit.monitor.fakes import NAMESPACE, UID

_INTERVAL: Final = 9
_LAST: Final = 10_000
_WRITE_SECONDS: Final = 0.3
"""At each phase of a save, at most, so that much may happen before the save is committed."""
_LONG_SECONDS: Final = 60.0
"""More than a step and a commit take, with another monitor in between, on a busy machine."""


def _training(
    line: Line, where: Where, plan: Plan, environ: dict[str, str], seconds: float
) -> None:
    """A script as its user writes it, which notes each step that it has trained."""
    slow = Slow(plan.seed, _WRITE_SECONDS)
    slow.armed = True
    failpoints.enable(failpoints.SAVE, slow)
    with RunContext.from_env(environ=environ) as ctx:
        trainer = Trainer(where, plan, ctx.monitor, range(plan.ranks))
        line.say("claimed", ctx.incarnation)
        with _notes(where).open("a", buffering=1) as notes:
            for step in range(1, _LAST):
                time.sleep(seconds)  # the step
                notes.write(f"{step}\n")
                ctx.report(step, _LAST)
                if ctx.should_checkpoint(step):
                    trainer.save(Step(step, Shape.CHECKPOINT))
                    ctx.wait_if_stopping()


def _notes(where: Where) -> Path:
    return where.root.parent / "trained"


class _Preempted:
    """One trial: the operator's side of it."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.plan = draw(trial.seed, shape=Shape.CHECKPOINT, split=False)
        self.cluster = Cluster(trial, self.plan)
        self.place = Place.choose("monitor-a")
        self.monitor = self.cluster.monitor(self.place)
        self.place.wait_ready(trial.watch.look)
        trial.steps |= {(0, step): Step(step, Shape.CHECKPOINT) for step in range(1, _LAST)}
        self.job = self._start()

    def _start(self) -> Child:
        where = self.cluster.where
        environ = {
            env.RUN_NAME: "run",
            env.RUN_NAMESPACE: NAMESPACE,
            env.RUN_UID: UID,
            env.CLUSTER: CLUSTER,
            env.ATTEMPT: "0",
            env.MONITOR_URL: f"http://127.0.0.1:{self.place.port}",
            env.TOKEN_FILE: str(self.cluster.token),
            env.CHECKPOINT_DIR: str(where.root),
            env.CHECKPOINT_INTERVAL: str(_INTERVAL),
        }
        seconds = self.trial.dice.uniform(0.01, 0.1)
        job = self.trial.child("job", _training, where, self.plan, environ, seconds)
        self.trial.owners[-1] = Owner(0, job.expect("claimed"))
        return job

    def trained(self) -> int:
        """The last step that was trained; 0: none."""
        notes = _notes(self.cluster.where)
        return len(notes.read_text().splitlines()) if notes.exists() else 0

    def ask(self, seconds: float) -> StopRequest:
        """Ask for a save; the pods go after ``seconds`` at the latest."""
        now = datetime.now(UTC).replace(microsecond=0)
        deadline = now + timedelta(seconds=seconds)
        request = StopRequest(since=now, deadline=deadline, reason=StopReason.PREEMPTION)
        self.cluster.api.ask_to_save(request)
        return request

    def wait(self, until: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Until something is so; the job must live meanwhile."""
        end = time.monotonic() + seconds
        while not until():
            self.trial.watch.look()
            if self.job.speaks():
                raise BrokenError(f"the job ended before {what}: {self.job.listen()}")
            if time.monotonic() > end:
                raise BrokenError(f"{what} did not come within {seconds:g} s")
            time.sleep(0.01)

    def answer(self, request: StopRequest) -> StopSave | None:
        """The monitor's answer to a request; what it calls committed must be."""
        found = self.cluster.api.answer()
        if found is None or found.since != request.since:
            return None
        if found.state is StopSaveState.FAILED:
            raise BrokenError(f"the save of step {found.step} is said to have failed")
        if found.state is StopSaveState.COMMITTED:
            self.trial.watch.look()
            newest = self.trial.watch.newest.get(SaveKind.CHECKPOINT, -1)
            if newest < found.step:
                raise BrokenError(f"step {found.step} is said to be committed, {newest} is")
        return found

    def is_saved(self, request: StopRequest) -> bool:
        """Whether the pods may go before the deadline."""
        found = self.answer(request)
        return found is not None and found.state is StopSaveState.COMMITTED

    def kill(self) -> int:
        """End the pods as a kubelet does, and the monitor; returns the last step trained."""
        self.job.signal(signal.SIGTERM)
        time.sleep(self.trial.dice.random() * 0.1)
        self.job.kill()
        self.monitor.signal(signal.SIGTERM)
        if self.monitor.wait() != 0:
            raise BrokenError(f"the monitor ended with {self.monitor.status} after SIGTERM")
        return self.trained()

    def lose_monitor(self) -> None:
        """SIGKILL, and another pod behind the same Service."""
        self.monitor.kill()
        self.place = Place("monitor-b", self.place.port, self.place.reservation)
        self.monitor = self.cluster.monitor(self.place)


def _preempted(trial: Trial) -> None:
    run = _Preempted(trial)
    first = trial.dice.randint(1, 3 * _INTERVAL)
    run.wait(lambda: run.trained() >= first, f"step {first}")
    time.sleep(trial.dice.random() * 0.1)
    if trial.point == "notice_too_short":
        request = run.ask(0.0)
        time.sleep(trial.dice.random())
        run.answer(request)
        run.kill()
    else:
        if trial.point == "withdrawn_before":
            run.ask(_LONG_SECONDS)
            time.sleep(trial.dice.random())
            run.cluster.api.ask_to_save(None)
            more = run.trained() + 3
            run.wait(lambda: run.trained() >= more, f"step {more} after the request was withdrawn")
            time.sleep(1.0)  # the name of a request is its second
        request = run.ask(_LONG_SECONDS)
        if trial.point == "monitor_killed":
            time.sleep(trial.dice.random() * 0.5)
            run.lose_monitor()
        run.wait(lambda: run.is_saved(request), "the save that was asked for", _LONG_SECONDS)
        saved = run.answer(request)
        time.sleep(trial.dice.random() * 0.5)  # the operator hears of it
        trained = run.kill()
        if saved is None or saved.step != trained:
            raise BrokenError(f"step {trained} was trained, and the answer is {saved}")
        committed = trial.check(run.plan)[SaveKind.CHECKPOINT]
        if max(committed, default=None) != trained:
            raise BrokenError(f"step {trained} was trained last, committed are {committed}")
    begun = range(max(1, run.trained() - 2 * _INTERVAL), run.trained() + 1)
    trial.check_resumes(run.plan, last=tuple(Step(step, Shape.CHECKPOINT) for step in begun))


SCENARIOS = (
    Scenario(
        name="preempted",
        broken="a queue takes the pods: a long notice, a withdrawn one, none; a monitor dies amid",
        holds="with notice the last step trained is the step resumed; else the last commit is",
        points=("notice", "notice_too_short", "withdrawn_before", "monitor_killed"),
        trial=_preempted,
    ),
)
