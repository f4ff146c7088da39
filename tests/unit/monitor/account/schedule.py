"""Whole runs in simulated time, of which the account is known exactly."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter
from trainsync.api.protocol import ProgressReport, RolloutSeconds, SaveKind, WeightsReport
from trainsync.api.spec import Role
from trainsync.api.status import AccountClass, AccountUnit, Phase, RolePods
from trainsync.monitor.account.account import OF_ROLE, Account
from trainsync.storage import records

START = 1_800_000_000.0
GPUS = 8
Truth = dict[Role, dict[AccountClass, float]]
_RECORD = TypeAdapter(Account)


@dataclass(frozen=True)
class Shape:
    """How a run behaves; times in seconds."""

    attempts: int = 4
    steps_between_saves: int = 5
    steps: tuple[int, int] = (10, 60)  # that an attempt takes before it dies
    step_seconds: tuple[float, float] = (5.0, 60.0)
    queue_seconds: tuple[float, float] = (0.0, 600.0)
    start_seconds: tuple[float, float] = (20.0, 200.0)
    trainers: int = 2
    explorers: int = 3
    paced: bool = True


@dataclass
class Run:
    """What happens in a run, and what its account must be.

    Attributes:
        messages: what is told to the monitor, and when it is told.
        pods: number of pods that hold and that wait, and the phase, from a time on.
        steps, again: steps trained, and how many of these were trained before.
    """

    messages: list[tuple[float, Callable[[Account, float], None]]] = field(default_factory=list)
    pods: list[tuple[float, int, int, Phase]] = field(default_factory=list)
    truth: Truth = field(default_factory=lambda: {role: defaultdict(float) for role in Role})
    end: float = START
    steps: int = 0
    again: int = 0

    def total(self, role: Role) -> float:
        """GPU-seconds of all pods of a role."""
        return sum(self.truth[role].values())


def play(random_: random.Random, shape: Shape) -> Run:
    """A run with failed attempts, the last of which ends well."""
    run, now = Run(), START
    newest = committed = 0
    run.pods.append((now, 0, 0, Phase.PENDING))
    for attempt in range(shape.attempts):
        waits = random_.uniform(*shape.queue_seconds)
        starts = random_.uniform(*shape.start_seconds)
        run.pods.append((now, 0, 1, Phase.STARTING))
        _spend(run, shape, AccountClass.QUEUE, waits)
        now += waits
        run.pods.append((now, 1, 0, Phase.STARTING))
        _spend(run, shape, AccountClass.RESTART, starts)
        resumed = committed
        _tell(run, now + starts / 2, lambda a, _, n=attempt, s=resumed: a.told_resume(n, s))
        now += starts
        run.pods.append((now, 1, 0, Phase.RUNNING))
        loop = _Loop(run, shape, random_, attempt, now, resumed, newest)
        for _ in range(random_.randint(*shape.steps)):
            loop.train()
        now, newest, committed = loop.now, max(newest, loop.step), loop.committed
        if attempt < shape.attempts - 1:  # a step is lost half-way, and pods take a while to end
            lost = random_.uniform(1.0, 60.0)
            _spend(run, shape, AccountClass.RESTART, lost)
            now += lost
            run.pods.append((now, 0, 0, Phase.RESTARTING))
            now += random_.uniform(0.0, 120.0)  # back-off
    run.pods.append((now, 1, 0, Phase.COMPLETE))
    ends = random_.uniform(1.0, 60.0)
    _spend(run, shape, AccountClass.IDLE, ends)
    now += ends
    run.pods.append((now, 0, 0, Phase.COMPLETE))
    run.end = now + 30.0
    return run


@dataclass
class _Loop:
    run: Run
    shape: Shape
    random: random.Random
    attempt: int
    began: float
    step: int
    newest: int
    now: float = field(init=False)
    committed: int = field(init=False)
    waited: float = 0.0
    rolled_out: dict[str, float] = field(default_factory=lambda: {"used": 0.0, "unused": 0.0})

    def __post_init__(self) -> None:
        self.now, self.committed = self.began, self.step

    def train(self) -> None:
        """One step: wait for batches, train, and save now and then."""
        draw, shape, truth = self.random, self.shape, self.run.truth
        length = draw.uniform(*shape.step_seconds)
        waits = draw.uniform(0.1, 0.4) * length if shape.paced else 0.0
        self.step += 1
        saves = self.step % shape.steps_between_saves == 0
        blocked = draw.uniform(0.1, 2.0) if saves else 0.0
        again = self.step <= self.newest
        self.run.steps += 1
        self.run.again += again
        weight = shape.trainers * GPUS
        truth[Role.TRAINER][AccountClass.SYNC] += waits * weight
        truth[Role.TRAINER][AccountClass.SAVE] += blocked * weight
        kind = AccountClass.REPEAT if again else AccountClass.TRAIN
        truth[Role.TRAINER][kind] += (length - waits) * weight
        self.now += length + blocked
        self.waited += waits
        self._roll_out(length + blocked)
        loop = {"loop_seconds": self.now - self.began, "waited_seconds": self.waited}
        report = ProgressReport(step=self.step, **(loop if shape.paced else {}))
        _tell(self.run, self.now, lambda a, t, n=self.attempt, r=report: a.trained(n, r, t))
        if saves:
            self.committed = self.step
            done = self.now + draw.uniform(0.1, 2.0)
            _tell(self.run, done, lambda a, _, s=blocked: a.saved(SaveKind.CHECKPOINT, s))

    def _roll_out(self, length: float) -> None:
        draw, shape, truth = self.random, self.shape, self.run.truth[Role.EXPLORER]
        if not shape.paced:
            truth[AccountClass.IDLE] += length * shape.explorers * GPUS
            return
        for _ in range(shape.explorers):
            busy = draw.uniform(0.5, 1.0) * length
            used = draw.random() > 0.1
            self.rolled_out["used" if used else "unused"] += busy
            kind = AccountClass.GENERATE if used else AccountClass.STALE
            truth[kind] += busy * GPUS
            truth[AccountClass.SYNC] += (length - busy) * GPUS
        elapsed = self.now - self.began
        rollouts = RolloutSeconds(
            clock=f"clock{self.attempt:05d}",
            loop=elapsed,
            present=elapsed * shape.explorers,
            **self.rolled_out,
        )
        report = WeightsReport(trainer_version=self.step, method="nccl", rollouts=rollouts)
        when = self.now - 0.01  # before the step is reported, as its batches were made before
        _tell(self.run, when, lambda a, t, n=self.attempt, r=report: a.synchronized(n, r, t))


def _spend(run: Run, shape: Shape, kind: AccountClass, seconds: float) -> None:
    run.truth[Role.TRAINER][kind] += seconds * shape.trainers * GPUS
    run.truth[Role.EXPLORER][kind] += seconds * shape.explorers * GPUS


def _tell(run: Run, when: float, tell: Callable[[Account, float], None]) -> None:
    run.messages.append((when, tell))


@dataclass(frozen=True)
class Trouble:
    """What happens between a run and its account: shares of messages, and seconds."""

    lost: float = 0.0
    doubled: float = 0.0
    longest_delay: float = 0.05
    look_seconds: float = 2.5  # between two looks at the pods
    write_seconds: float = 10.0
    monitor_lives: float | None = None  # on average
    monitor_away: float = 20.0


def watch(run: Run, shape: Shape, random_: random.Random, trouble: Trouble) -> Account:
    """The account of a run whose monitor meets this trouble."""
    todo = _looks(run, shape, random_, trouble)
    for when, tell in run.messages:
        for _ in range(1 + (random_.random() < trouble.doubled)):
            if random_.random() >= trouble.lost:
                todo.append((when + random_.uniform(0.0, trouble.longest_delay), tell))
    account = Account.begin("uid", AccountUnit.GPU, START)
    kept = records.encode(_RECORD, account)
    wrote = START
    dies = _life(random_, trouble) + START
    back = START
    for when, tell in sorted(todo, key=lambda entry: entry[0]):
        if when >= dies:
            account = _again(kept)
            back = dies + random_.uniform(0.0, trouble.monitor_away)
            dies = back + _life(random_, trouble)
        if when < back:
            continue  # nobody hears it
        tell(account, when)
        check(account)
        if when - wrote >= trouble.write_seconds:
            kept, wrote = records.encode(_RECORD, account), when
    return _again(records.encode(_RECORD, account))


def check(account: Account) -> None:
    """No class is negative, none is of another role, and what is settled is never more than is."""
    for role, ledger in account.roles.items():
        assert set(ledger.seconds) <= set(OF_ROLE[role]), (role, ledger.seconds)
        assert all(seconds >= 0 for seconds in ledger.seconds.values()), ledger.seconds
        assert ledger.until <= account.time


def _again(kept: bytes) -> Account:
    return records.decode(_RECORD, kept, Path("ACCOUNT.json"))


def _life(random_: random.Random, trouble: Trouble) -> float:
    mean = trouble.monitor_lives
    return float("inf") if mean is None else random_.expovariate(1 / mean)


def _looks(
    run: Run, shape: Shape, random_: random.Random, trouble: Trouble
) -> list[tuple[float, Callable[[Account, float], None]]]:
    found: list[tuple[float, Callable[[Account, float], None]]] = []
    when, at, pods = START, 0, _pods(run, 0, shape)
    while when < run.end:
        while len(run.pods) > at + 1 and run.pods[at + 1][0] <= when:
            at += 1
            pods = _pods(run, at, shape)
        phase = run.pods[at][3]
        found.append((when, lambda a, t, p=pods, f=phase: a.see_pods(p, f.value, t)))
        when += random_.uniform(0.5, 1.5) * trouble.look_seconds
    return found


def _pods(run: Run, at: int, shape: Shape) -> dict[Role, RolePods]:
    _, held, waiting, _ = run.pods[at]
    return {
        role: RolePods(
            role=role.value,
            held=held * count,
            held_gpus=held * count * GPUS,
            waiting=waiting * count,
            waiting_gpus=waiting * count * GPUS,
        )
        for role, count in ((Role.TRAINER, shape.trainers), (Role.EXPLORER, shape.explorers))
    }


def sum_error(run: Run, account: Account, role: Role) -> float:
    """By which share the account's sum is wrong."""
    return abs(account.roles[role].total / run.total(role) - 1.0)


def misplaced(run: Run, account: Account, role: Role) -> float:
    """The share of a role's seconds that is in another class than it should be."""
    seconds, truth = account.roles[role].seconds, run.truth[role]
    wrong = sum(abs(seconds.get(kind, 0.0) - truth.get(kind, 0.0)) for kind in AccountClass)
    return wrong / 2 / run.total(role)
