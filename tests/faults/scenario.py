"""What a scenario is, and the list of them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.faults.trial import Trial


@dataclass(frozen=True)
class Scenario:
    """A fault, the points where it strikes, and what must hold beside the common promises.

    ``trial`` raises `BrokenError` when a promise does not hold. ``seed`` modulo the number of
    points says which point a trial is of.
    """

    name: str
    broken: str
    holds: str
    points: tuple[str, ...]
    trial: Callable[[Trial], None]
    faults: int = 1
    """How many different faults the points are; each of them is tried so many times as asked."""
    needs_root: str | None = None
    """Why it can only be made by root."""

    def point(self, seed: int) -> str:
        """Where the fault of this trial strikes."""
        return self.points[seed % len(self.points)]

    def seeds(self, first: int, times: int) -> Iterable[int]:
        """Of every trial, each point as often as the others."""
        count = -(-times * self.faults // len(self.points)) * len(self.points)
        start = first - first % len(self.points)
        return range(start, start + count)

    @property
    def skipped(self) -> str | None:
        """Why it cannot run here."""
        return self.needs_root if os.geteuid() != 0 else None
