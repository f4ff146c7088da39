"""A job whose every call to the disk is known, so that each can be struck in turn.

The first attempt commits a checkpoint and the state dict of the step after it. The second one
claims, resumes at the checkpoint, saves that step again (its state dict takes the older one's
place), another (retention removes the first), one that is aborted, and a last one. So there is
everything that the protocol ever does to the disk.
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
from tests.faults.training import Trainer, Where, host, join
from tests.faults.trial import Trial
from tests.faults.ways import FAILURE

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
"""The same in all trials, and so its calls are."""
SOUND: Final = replace(PLAN, failing=None)
"""For the attempt that comes after."""

_TWICE: Final = 2


@dataclass(frozen=True)
class Saved:
    """How the save of a step went: what it raised, but for what was meant, or how it ended."""

    step: int
    failed: list[str]
    ended: dict[SaveKind, SaveState]


class RefusedError(Exception):
    """The attempt could not begin; the message says why."""


class DeadError(Exception):
    """A process of the job was killed."""


def enumerable(acts: Sequence[Act]) -> list[Act]:
    """Those that come in every run, in order; a lock is taken again as often as time allows."""
    return [act for act in acts if not act.place.endswith(".lock") or act.nth <= _TWICE]


def live(
    line: Line, where: Where, ranks: Sequence[int], hosts: bool, strike: Strike | None
) -> None:
    """The second attempt, or a process of it.

    Says ``begun`` when it has claimed and resumed, or ``refused`` with the error. Hears ``train``
    (says ``trained``, with how each step went), ``heal`` (says ``healed``, with whether a call was
    struck), ``after`` (saves the last step, says ``after``), ``acts`` (says ``acts``) and ``end``.
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
    # What failed may not even be registered; and a failure that its own disk does not take may be
    # known to nobody until the deadline.
    silent = disk.struck and step.number == trainer.plan.failing
    if not failed and not silent:
        try:
            ended = {kind: s.state for kind, s in trainer.outcomes(step).items()}
        except MonitorError as error:
            failed.append(f"{type(error).__name__}: {error}")
    return Saved(step.number, failed, ended)


class Job:
    """The second attempt's processes, as the conductor sees them.

    Args:
        role: who is struck: ``job`` (one process for all), ``monitor`` or ``ranks`` of two.
        restarts: a monitor that is killed is started again, as Kubernetes does.
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
        """Until the attempt has resumed. Raises `RefusedError`, `DeadError`."""
        self._hear(None, "begun")
        if self._split:
            self._ranks = self._start("ranks")
            self._hear(self._ranks, "begun")

    def train(self) -> list[Saved]:
        """Every step but the last. Raises `DeadError`."""
        self._trainer.tell("train")
        saved: list[Saved] = self._hear(self._ranks, "trained")
        return saved

    def heal(self) -> bool:
        """The disk fails no more; whether a call was struck."""
        struck = False
        for child in self._all:
            child.tell("heal")
            struck |= child.expect("healed")
        return struck

    def after(self) -> None:
        """The last step commits. Raises `DeadError`."""
        self._trainer.tell("after")
        self._hear(self._ranks, "after")

    def acts(self, role: str) -> list[Act]:
        """What the process has done to the disk so far."""
        child = self._trainer if role == "ranks" else self._host
        child.tell("acts")
        acts: list[Act] = child.expect("acts")
        return acts

    def end(self) -> None:
        """Every process ends by itself. Raises `DeadError`."""
        for child in reversed(self._all):
            child.tell("end")
            status = child.wait()
            if status < 0:
                raise DeadError(child.name)
            if status != 0:
                raise BrokenError(f"{child.name} ended with {status}")

    def kill(self) -> None:
        """End what lives; a monitor may end by itself, as if its trainers had been killed alone."""
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
        """What ``child`` (the monitor's process, if None) says next."""
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
