"""A job with known disk calls, so that a fault can be injected at each call in turn.

The first attempt commits a checkpoint and the state dict of the next step. The second attempt
claims, resumes at the checkpoint, and saves four steps: that next step again (its state dict
replaces the older one), one after which retention removes the first checkpoint, one that is
aborted, and a last one. This covers every disk operation of the protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.api.spec import Verify
from trainsync.monitor.errors import MonitorError

from tests.faults.disk import Act, Disk, Strike
from tests.faults.plan import Plan, Shape, Step
from tests.faults.processes import BrokenError, Child, Line, first_to_speak
from tests.faults.training import FAILURE, Trainer, Where, host, join
from tests.faults.trial import Trial

HISTORY: Final = (Step(10, Shape.CHECKPOINT), Step(20, Shape.STATE_DICT))
STEPS: Final = (Step(20, Shape.REUSE), Step(30, Shape.CHECKPOINT), Step(40, Shape.REUSE))
LAST: Final = Step(50, Shape.CHECKPOINT)
PLAN: Final = Plan(
    seed=3,
    ranks=1,
    components=("model", "optim"),
    largest=100,
    keep=1,
    verify=Verify.SIZE,
    history=HISTORY,
    fault=STEPS[-1],
    register_first=True,
    split=True,
    failing=40,
)
"""Equal in all trials, so that the calls are equal."""
SOUND: Final = replace(PLAN, failing=None)
"""The plan of the next attempt."""

_TWICE: Final = 2


@dataclass(frozen=True)
class Saved:
    """Result of a step's save: its unexpected errors, or its final state."""

    step: int
    failed: list[str]
    ended: dict[SaveKind, SaveState]


class RefusedError(Exception):
    """The attempt could not begin; the message has the cause."""


class DeadError(Exception):
    """A process of the job was killed."""


def enumerable(acts: Sequence[Act]) -> list[Act]:
    """The calls that occur in every run, in order; the number of attempts to lock varies with
    time."""
    return [act for act in acts if not act.place.endswith(".lock") or act.nth <= _TWICE]


def live(
    line: Line, where: Where, ranks: Sequence[int], hosts: bool, strike: Strike | None
) -> None:
    """The second attempt, or one process of it.

    Sends ``begun`` after the claim and resume, or ``refused`` with the error. Commands: ``train``
    (answers ``trained`` with each step's result), ``heal`` (answers ``healed`` with whether a
    fault was injected), ``after`` (saves the last step, answers ``after``), ``acts`` (answers
    ``acts``) and ``end``.
    """
    disk = Disk(where.root, strike)
    disk.install()
    plan = PLAN.without_history()
    try:
        client = host(where, plan) if hosts else join(where)
        client.resume()
    except (MonitorError, OSError) as error:
        line.say("refused", f"{type(error).__name__}: {error}")
        return
    trainer = Trainer(where, plan, client, ranks)
    line.say("begun")
    while (word := line.hear(120)) != "end":
        if word == "train":
            line.say("trained", [_save(trainer, step, disk) for step in STEPS])
        elif word == "heal":
            disk.heal()
            line.say("healed", disk.struck)
        elif word == "after":
            trainer.go_on(LAST)
            line.say("after")
        elif word == "acts":
            line.say("acts", list(disk.acts))
        else:
            raise ValueError(word)
    client.close()


def _save(trainer: Trainer, step: Step, disk: Disk) -> Saved:
    failed = [text for text in trainer.try_to_save(step) if FAILURE not in text]
    ended: dict[SaveKind, SaveState] = {}
    # A failed save may not even be registered, and a failure that cannot be recorded on disk stays
    # unknown until the deadline.
    silent = disk.struck and step.number == trainer.plan.failing
    if not failed and not silent:
        try:
            ended = {kind: s.state for kind, s in trainer.outcomes(step).items()}
        except MonitorError as error:
            failed.append(f"{type(error).__name__}: {error}")
    return Saved(step.number, failed, ended)


class Job:
    """The conductor's handle of the second attempt's processes.

    Args:
        role: the process with the fault: ``job`` (one process for all), or ``monitor`` or ``ranks``
            of two.
        restarts: a killed monitor is restarted, as by Kubernetes.
    """

    def __init__(self, trial: Trial, role: str, strike: Strike | None, restarts: bool) -> None:
        self._trial = trial
        self._split = role != "job"
        self._strikes = {"ranks": strike} if role == "ranks" else {"host": strike}
        self._restarts = restarts
        self._ranks: Child | None = None
        first = trial.attempt(PLAN)
        older = trial.child("older attempt", _older, first)
        older.expect("history")
        older.tell("end")
        older.wait()
        self.where = trial.attempt(PLAN)
        for step in (*STEPS, LAST):
            trial.steps[1, step.number] = step
        self._host = self._start("host")
        self.restarted = False

    def begin(self) -> None:
        """Wait until the attempt has resumed. Raises `RefusedError`, `DeadError`."""
        self._hear(None, "begun")
        if self._split:
            self._ranks = self._start("ranks")
            self._hear(self._ranks, "begun")

    def train(self) -> list[Saved]:
        """Train every step but the last. Raises `DeadError`."""
        self._trainer.tell("train")
        saved: list[Saved] = self._hear(self._ranks, "trained")
        return saved

    def heal(self) -> bool:
        """End the disk's fault; returns whether a fault was injected."""
        struck = False
        for child in self._all:
            child.tell("heal")
            struck |= child.expect("healed")
        return struck

    def after(self) -> None:
        """Commit the last step. Raises `DeadError`."""
        self._trainer.tell("after")
        self._hear(self._ranks, "after")

    def acts(self, role: str) -> list[Act]:
        """The disk calls of the process so far."""
        child = self._trainer if role == "ranks" else self._host
        child.tell("acts")
        acts: list[Act] = child.expect("acts")
        return acts

    def end(self) -> None:
        """End every process normally. Raises `DeadError`."""
        for child in reversed(self._all):
            child.tell("end")
            status = child.wait()
            if status < 0:
                raise DeadError(child.name)
            if status != 0:
                raise BrokenError(f"{child.name} ended with {status}")

    def kill(self) -> None:
        """Kill the remaining processes; a monitor may exit normally, as if only its trainers were
        killed."""
        if self._host.status is None and self._trial.dice.random() < 0.5:
            self._host.tell("end")
            self._host.wait()
        for child in self._all:
            child.kill()

    @property
    def _all(self) -> list[Child]:
        return [self._host] if self._ranks is None else [self._host, self._ranks]

    @property
    def _trainer(self) -> Child:
        return self._ranks or self._host

    def _start(self, part: str) -> Child:
        ranks = range(PLAN.ranks) if part == "ranks" or not self._split else ()
        strike = self._strikes.pop(part, None)
        hosts = part == "host"
        return self._trial.child(part, live, self.where, list(ranks), hosts, strike)

    def _hear(self, child: Child | None, what: str) -> Any:
        """The next message of ``child`` (None: the monitor's process)."""
        while True:
            awaited = child or self._host
            speaker = first_to_speak([awaited, self._host])
            said, value = speaker.listen()
            if said == what and speaker is awaited:
                return value
            if said == "refused":
                raise RefusedError(value)
            if said != "ended" or value >= 0:
                raise BrokenError(f"{speaker.name}: expected {what!r}, it said {said!r}: {value}")
            if speaker is not self._host or not self._split or not self._restarts:
                raise DeadError(speaker.name)
            self.restarted = True
            self._host = self._start("host")
            if child is not None:
                self._host.expect("begun")


def _older(line: Line, where: Where) -> None:
    client = host(where, PLAN)
    Trainer(where, PLAN, client, range(PLAN.ranks)).train(PLAN.history)
    line.say("history")
    line.hear()
    client.close()
