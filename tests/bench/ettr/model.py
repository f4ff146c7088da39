"""What a simulated run is made of: its shape, what dies, how that is mended, and the seconds of it.

`tests.bench.ettr.simulation` plays it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Part(StrEnum):
    """What dies."""

    TRAINER = "trainer"  # a process, in a pod that lives
    POD = "pod"  # of a trainer
    NODE = "node"  # of a trainer
    EXPLORER = "explorer"
    MONITOR = "monitor"


class Restarts(StrEnum):
    """What is started again."""

    PART = "part"  # alone; the others go on
    TRAINERS = "trainers"  # in place
    JOB = "job"  # all processes but the monitor


@dataclass(frozen=True)
class Shape:
    """A run without faults. Seconds are those of one step."""

    steps: int = 100
    rollout: float = 200.0
    train: float = 90.0
    sync: float = 10.0
    ahead: int = 0
    explorers: int = 8

    @property
    def period(self) -> float:
        """Seconds from one step to the next."""
        work = self.train + self.sync
        return max(self.rollout, work) if self.ahead else self.rollout + work

    def scaled(self, period: float) -> "Shape":
        """The same run with steps of ``period`` seconds."""
        by = period / self.period
        return replace(self, rollout=self.rollout * by, train=self.train * by, sync=self.sync * by)


@dataclass(frozen=True)
class Way:
    """How the loss of a part is mended.

    Attributes:
        restarts: what starts again.
        seconds: until that works.
        waits: seconds before it starts, by the number of restarts of that kind; then the last.
    """

    restarts: Restarts
    seconds: float
    waits: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class Recovery:
    """How a system recovers.

    Attributes:
        ways: for each part that may die.
        save_every: steps from one save to the next.
        commit: seconds from the end of a step until its save counts.
        lease: seconds after which a dead explorer is known to be lost.
        keeps_batches: batches outlive a restart of trainers in place that loses no trained step,
            and explorers make more meanwhile.
        ends_turns: a restart in place ends the turns under way, whose batches nobody would take.
    """

    ways: Mapping[Part, Way]
    save_every: int = 1
    commit: float = 0.0
    lease: float = 30.0
    keeps_batches: bool = False
    ends_turns: bool = False


@dataclass(frozen=True, order=True)
class Fault:
    """A part dies in a step.

    Attributes:
        at: how far the step is then, in periods after the first end of the step before: 0 to 1.
    """

    step: int
    at: float
    part: Part = Part.TRAINER


@dataclass(frozen=True)
class Outcome:
    """Seconds of a run.

    Attributes:
        effective: of the same run without faults.
        total: from the first step's begin to the last step's end.
        down: trainers were down.
        trained: they trained and published, also in steps that were lost.
        waited: they waited for a batch.
    """

    effective: float
    total: float
    down: float
    trained: float
    waited: float

    @property
    def ratio(self) -> float:
        """The effective training time ratio."""
        return self.effective / self.total

    @property
    def pause(self) -> float:
        """Of the time that was not effective: trainers were down."""
        return min(self.down, self.total - self.effective)

    @property
    def lost(self) -> float:
        """The rest of that time: work that was done again, and waiting for it."""
        return self.total - self.effective - self.pause
