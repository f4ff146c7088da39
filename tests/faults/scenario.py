"""The definition of a scenario, and the registry of scenarios."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.faults.trial import Trial


@dataclass(frozen=True)
class Scenario:
    """A fault, its points, and the promises in addition to the common ones.

    ``trial`` raises `BrokenError` for a broken promise. ``seed`` modulo the number of points is the
    trial's point.
    """

    name: str
    broken: str
    holds: str
    points: tuple[str, ...]
    trial: Callable[[Trial], None]
    faults: int = 1
    """The number of different faults among the points; each is tried as often as requested."""
    needs_root: str | None = None
    """Why the scenario needs root, or None."""

    def point(self, seed: int) -> str:
        """The point of this trial's fault."""
        return self.points[seed % len(self.points)]

    def seeds(self, first: int, times: int) -> Iterable[int]:
        """The seeds of all trials, with each point equally often."""
        count = -(-times * self.faults // len(self.points)) * len(self.points)
        start = first - first % len(self.points)
        return range(start, start + count)

    @property
    def skipped(self) -> str | None:
        """Why the scenario cannot run here, or None."""
        return self.needs_root if os.geteuid() != 0 else None
