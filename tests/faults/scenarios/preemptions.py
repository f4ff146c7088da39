"""Runs that are suspended or preempted: a save is asked for, then the pods go."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.api.status import StopReason, StopRequest, StopSave, StopSaveState
from trainsync.storage.saves import scan

from tests.faults import promises
from tests.faults.cluster import Cluster
from tests.faults.inject import kill_me
from tests.faults.kube import Place
from tests.faults.plan import Step, draw
from tests.faults.processes import SECONDS, BrokenError, Child
from tests.faults.scenario import Scenario
from tests.faults.scenarios.common import COMMIT_PHASES
from tests.faults.scenarios.preempted_job import Counter, Job, drive, follow, hold_pod, step_of
from tests.faults.trial import Trial

_LONG_SECONDS: Final = 40.0
"""A notice that is longer than any commit, on a busy machine too."""
_SHORT_SECONDS: Final = 0.8
_SPARE_SECONDS: Final = 5.0 + 1.0
"""A last request of the preStop command, and the delay of its end on a busy machine."""


@dataclass(frozen=True)
class _Notice:
    """One request: how long it gives, and by which way the pods go."""

    seconds: float
    reason: StopReason

    @property
    def is_long(self) -> bool:
        return self.seconds >= _LONG_SECONDS


class _Run:
    """One run on a cluster: its API server, its monitor, and one attempt after another."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        # `Plan.fault` and `Plan.after` are not saved: the loop saves what is due.
        plan = replace(draw(trial.seed), history=())
        self.plan = replace(plan, fault=Step(0, plan.fault.shape))
        self.cluster = Cluster(trial, self.plan)
        self.where = self.cluster.where
        self.counter = Counter()
        self.place = Place.choose("monitor-0")
        self._deadly = trial.directory / "monitor-dies"
        phase = trial.dice.choice(COMMIT_PHASES)
        self.monitor = self.cluster.monitor(self.place, partial(_die, self._deadly, phase))
        self.place.wait_ready(trial.watch.look)
        self._url = f"http://127.0.0.1:{self.place.port}"
        self._since = datetime.now(UTC).replace(microsecond=0)
        self._pods: list[Child] = []

    def start(self) -> int:
        """The attempt's pods; returns the step that it resumes at."""
        trial, plan = self.trial, self.plan
        under_way = trial.point == "amid_a_save"
        job = Job(
            where=self.where,
            plan=plan,
            url=self._url,
            token=self.cluster.token,
            interval=trial.dice.randint(1, 2) if under_way else trial.dice.choice((3, 10, 10**6)),
            step_seconds=trial.dice.choice((0.001, 0.01, 0.1)),
            slow_seconds=0.05 if under_way else trial.dice.choice((0.0, 0.01)),
            in_order=trial.dice.random() < 0.5,
        )
        there: list[int] = []
        if plan.split:
            count = trial.dice.randint(1, plan.ranks)
            there = sorted(trial.dice.sample(range(plan.ranks), count))
        here = [rank for rank in range(plan.ranks) if rank not in there]
        ours, theirs = Pipe()
        self._pods = [
            trial.child("driver", drive, job, here, ours if there else None, self.counter)
        ]
        if there:
            self._pods.append(trial.child("ranks", follow, job, there, theirs))
        ours.close()
        theirs.close()
        resumed: int = self._pods[0].expect("resumed")
        self.wait(lambda: self.counter.step > resumed, "a step is trained")
        time.sleep(trial.dice.random() * 0.4)  # the fault strikes at any moment of a step
        return resumed

    def ask(self, notice: _Notice) -> StopRequest:
        """The operator's request, which names itself by its time."""
        self._since += timedelta(seconds=1)
        now = datetime.now(UTC)
        request = StopRequest(
            since=self._since,
            deadline=now + timedelta(seconds=notice.seconds),
            reason=notice.reason,
        )
        self.cluster.api.ask_to_stop(request)
        return request

    def answer(self, request: StopRequest) -> StopSave | None:
        """The answer to this request, which must be true."""
        found = self.cluster.api.stop_save()
        if found is None or found.since != request.since:
            return None
        promises.check_answer(self.trial.run, found)
        return found

    def preempt(self, notice: _Notice) -> int | None:
        """Ask, wait as the operator or the pods do, and free the pods.

        Returns the step that status tells to be committed by then.
        """
        if notice.reason is StopReason.PREEMPTION:
            request = self._wait_in_pods(notice)
        else:
            request = self._wait_in_operator(notice)
        answer = self.answer(request)
        told = None
        if answer is not None and answer.state is StopSaveState.COMMITTED:
            told = answer.step
        if notice.is_long and told is None:
            raise BrokenError(
                f"{notice.seconds:g} s were given, and nothing is told to be committed: {answer}"
            )
        self.trial.note("saved before the pods went" if told is not None else "not saved in time")
        self._free()
        return told

    def kill_monitor(self) -> None:
        """Kill the monitor now, or at the next commit's phase; another one follows."""
        dice = self.trial.dice
        if dice.random() < 0.4:
            time.sleep(dice.random() * 0.3)  # at any moment of the request
            self.monitor.signal(signal.SIGKILL)
        else:
            self._deadly.touch()
        if self.monitor.wait() != -signal.SIGKILL:
            raise BrokenError(f"the monitor was not killed: it ended with {self.monitor.status}")
        self._deadly.unlink(missing_ok=True)
        self.place = replace(self.place, identity="monitor-1")
        self.monitor = self.cluster.monitor(self.place)

    def withdraw(self) -> None:
        """The run is resumed before its pods go, and trains on."""
        self.cluster.api.ask_to_stop(None)
        step = self.counter.step
        self.wait(lambda: self.counter.step > step, "training goes on after the withdrawal")

    def resume(self, told: int | None) -> None:
        """The next attempt, beside the same monitor, goes on where the run was left."""
        trained, before = self.counter.step, self._left()
        self._know_steps()
        self.cluster.api.set_attempt(self.where.owner.attempt + 1)
        self.where = self.trial.attempt(self.plan)
        promises.check_kept(told, trained, self.start(), before)

    def end(self, told: int | None) -> None:
        """The monitor ends, and the last attempt goes on where the run was left."""
        trained, left = self.counter.step, self._left()
        self._know_steps()
        promises.check_kept(told, trained, left, left)
        self.monitor.signal(signal.SIGTERM)
        if self.monitor.wait() != 0:
            raise BrokenError(f"the monitor ended with {self.monitor.status} after SIGTERM")
        # It expects the newest commit or complete save, and compares every byte.
        self.trial.check_resumes(self.plan, last=self._begun())

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Wait until ``condition``; the pods and the pointers are looked at meanwhile."""
        end = time.monotonic() + seconds
        while not condition():
            self.trial.watch.look()
            for pod in self._pods:
                if pod.name == "driver" and pod.speaks():
                    raise BrokenError(f"{pod.name} said {pod.listen()}")
            if time.monotonic() > end:
                raise BrokenError(f"not within {seconds:g} s: {what}")
            time.sleep(0.005)  # polling interval

    def _wait_in_operator(self, notice: _Notice) -> StopRequest:
        """As the operator (`decide.stopping.over`): until an answer, or the deadline."""
        request = self.ask(notice)
        end = time.monotonic() + notice.seconds
        if self.trial.point == "monitor_killed":
            self.kill_monitor()

        def over() -> bool:
            return self._told(request) or time.monotonic() >= end

        self.wait(over, "the operator frees the pods")
        return request

    def _told(self, request: StopRequest) -> bool:
        answer = self.answer(request)
        return answer is not None and answer.state is not StopSaveState.SAVING

    def _wait_in_pods(self, notice: _Notice) -> StopRequest:
        """The queue takes the pods: their preStop command runs, and the operator asks meanwhile."""
        arguments = (self._url, self.cluster.token, notice.seconds)
        hooks = [self.trial.child("preStop", hold_pod, *arguments) for _ in self._pods]
        # The operator hears of it some time later.
        time.sleep(self.trial.dice.random() * min(0.3, notice.seconds))
        request = self.ask(notice)
        self.wait(lambda: all(one.speaks() for one in hooks), "the preStop commands end")
        for one in hooks:
            _, held = one.expect("let go")
            promises.check_freed(held, notice.seconds, _SPARE_SECONDS)
        if notice.is_long:
            # The preStop command hears the monitor itself, some time before the status tells of it.
            self.wait(lambda: self._told(request), "the status tells how the save ended")
        return request

    def _free(self) -> None:
        """SIGTERM and SIGKILL to each pod, as the kubelet sends them; some time later."""
        dice = self.trial.dice
        time.sleep(dice.random() * 0.2)  # the operator hears of the answer some time later
        dice.shuffle(self._pods)
        for pod in self._pods:
            pod.signal(signal.SIGTERM)
        time.sleep(dice.choice((0.0, dice.random() * 0.5)))
        for pod in self._pods:
            pod.kill()
        self._pods = []

    def _begun(self) -> tuple[Step, ...]:
        """Steps of which the attempt has begun a save."""
        owner = self.where.owner
        found = scan.Scanner(self.trial.run).saves(owner.attempt, owner.incarnation)
        numbers = sorted({save.step for save in found})
        return tuple(step_of(self.plan, number) for number in numbers)

    def _left(self) -> int:
        """With the pods gone: the newest step that is committed or will be."""
        whole = {step.number for step in self._begun() if self._will_commit(step)}
        self.trial.watch.look()
        return max(whole | {self.trial.watch.newest.get(SaveKind.CHECKPOINT, 0)})

    def _will_commit(self, step: Step) -> bool:
        owner = self.where.owner
        saves = promises.will_commit(self.trial.run, self.plan, owner, step)
        return saves[SaveKind.CHECKPOINT]

    def _know_steps(self) -> None:
        attempt = self.where.owner.attempt
        for number in range(self.counter.step + 1):
            self.trial.steps[attempt, number] = step_of(self.plan, number)
        self.trial.check(self.plan)


def _die(flag: Path, wanted: str, phase: str) -> None:
    """Kill the monitor at this phase of a commit, once it is told to."""
    if phase == wanted and flag.exists():
        kill_me()


def _notice(trial: Trial, *, is_long: bool) -> _Notice:
    reason = trial.dice.choice(list(StopReason))
    if trial.point == "monitor_killed":
        # A preStop command that has not heard of the request waits 3 s for an absent monitor.
        reason = StopReason.SUSPEND
    return _Notice(_LONG_SECONDS if is_long else trial.dice.random() * _SHORT_SECONDS, reason)


def _preempted(trial: Trial) -> None:
    run = _Run(trial)
    run.start()
    if trial.point == "withdrawn":
        request = run.ask(_notice(trial, is_long=True))
        if trial.dice.random() < 0.7:
            run.wait(lambda: run.answer(request) is not None, "the request is answered")
        run.withdraw()
    if trial.point == "again":
        for _ in range(trial.dice.randint(1, 2)):
            told = run.preempt(_notice(trial, is_long=trial.dice.random() < 0.7))
            run.resume(told)
    told = run.preempt(_notice(trial, is_long=trial.point != "too_short"))
    run.end(told)


SCENARIOS = (
    Scenario(
        name="run_preempted",
        broken="a suspension or preemption: a save is asked for, then SIGTERM and SIGKILL",
        holds="a notice longer than the commit loses no step; a shorter one, none committed",
        points=("in_time", "too_short", "amid_a_save", "monitor_killed", "withdrawn", "again"),
        trial=_preempted,
    ),
)
