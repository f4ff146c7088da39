"""The run's history, collected from its snapshots: pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from demo.snapshot import Snapshot

RESUMED_STEP = "resumed_step"
"""Metric of the example: the committed step from which this attempt resumed, or 0."""


@dataclass
class History:
    """Collects from every snapshot the facts that the promises need."""

    last: Snapshot = field(default_factory=Snapshot)
    rewards: dict[int, float] = field(default_factory=dict)
    probe_differences: dict[int, float] = field(default_factory=dict)
    probe_tolerance: float | None = None
    commits: list[int] = field(default_factory=list)
    killed_at: Snapshot | None = None
    committed_before_resume: int | None = None
    resumed_step: int | None = None

    def tell(self, snapshot: Snapshot) -> None:
        """Add the next snapshot."""
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
        if self.killed_at is None or self.resumed_step is not None:
            return
        # The status still shows the last report of the killed attempt, which started from 0.
        if metrics.get(RESUMED_STEP, 0) > 0:
            self.resumed_step = int(metrics[RESUMED_STEP])
        else:
            # A save with all shards on disk when the trainer died may still commit.
            self.committed_before_resume = snapshot.committed

    def kill(self) -> None:
        """Record that a trainer is killed now."""
        self.killed_at = self.last
        self.committed_before_resume = self.last.committed

    def ready_to_kill(self, commits: int) -> bool:
        """Whether enough saves are committed and enough steps remain for a resume."""
        last = self.last
        if self.killed_at is not None or last.finished or last.phase != "Running":
            return False
        if last.step is None or last.committed is None or len(self.commits) < commits:
            return False
        return last.total is None or last.step < last.total
