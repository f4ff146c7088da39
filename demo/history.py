"""The run's history, collected from its snapshots: pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from demo.snapshot import Snapshot

RESUMED_STEP = "resumed_step"
"""Metric of the example: the committed step from which its trainers resumed, or 0."""


class Fault(Enum):
    """What the demo kills."""

    PROCESS = "a trainer's process"
    POD = "a trainer's pod"


@dataclass
class Kill:
    """A fault, and how the run went on.

    Attributes:
        at: the run when it happened, and ``seconds`` by the caller's clock.
        before: the last committed step before trainers resumed.
        after: the run at the first step that was told of afterwards.
        pause: seconds from the kill until then.
    """

    fault: Fault
    at: Snapshot
    seconds: float
    before: int | None
    after: Snapshot | None = None
    pause: float | None = None

    @property
    def resumed(self) -> int | None:
        """The step that trainers resumed from."""
        return None if self.after is None else _resumed_step(self.after)


@dataclass
class History:
    """Collects from every snapshot the facts that the promises need."""

    last: Snapshot = field(default_factory=Snapshot)
    rewards: dict[int, float] = field(default_factory=dict)
    probe_differences: dict[int, float] = field(default_factory=dict)
    probe_tolerance: float | None = None
    commits: list[int] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    def tell(self, snapshot: Snapshot, seconds: float) -> None:
        """Add the next snapshot, seen at ``seconds``."""
        self.last = snapshot
        if snapshot.committed is not None and snapshot.committed not in self.commits:
            self.commits.append(snapshot.committed)
        metrics = snapshot.metrics
        if snapshot.step is not None:
            if "reward" in metrics:
                self.rewards[snapshot.step] = metrics["reward"]
            if "probe_max_abs_diff" in metrics:
                self.probe_differences[snapshot.step] = metrics["probe_max_abs_diff"]
        self.probe_tolerance = metrics.get("probe_tolerance", self.probe_tolerance)
        if not self.kills or self.kills[-1].after is not None:
            return
        kill = self.kills[-1]
        # The status still shows the last report from before, whose trainers resumed from less.
        if _resumed_step(snapshot) > _resumed_step(kill.at):
            kill.after, kill.pause = snapshot, seconds - kill.seconds
        else:
            # A save with all shards on disk when the trainer died may still commit.
            kill.before = snapshot.committed

    def kill(self, fault: Fault, seconds: float) -> None:
        """Record that a trainer is killed at ``seconds``."""
        self.kills.append(Kill(fault, self.last, seconds, self.last.committed))

    def next_fault(self, commits: int) -> Fault | None:
        """The next fault, when there is something new to resume from (at first ``commits``
        saves) and steps remain for that."""
        last, left = self.last, tuple(Fault)[len(self.kills) :]
        if not left:
            return None
        if last.finished or last.phase != "Running" or last.step is None or last.committed is None:
            return None
        if last.total is not None and last.step >= last.total:
            return None
        if not self.kills:
            return left[0] if len(self.commits) >= commits else None
        resumed = self.kills[-1].resumed
        return left[0] if resumed is not None and last.committed > resumed else None


def _resumed_step(snapshot: Snapshot) -> int:
    return int(snapshot.metrics.get(RESUMED_STEP, 0))
