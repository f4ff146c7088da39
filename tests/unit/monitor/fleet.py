"""Successive monitors of one run, which crash or are stopped and resume too late."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainsync import failpoints
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.core.core import MonitorCore

PHASES = list(failpoints.POINTS[failpoints.COMMIT])
GATE = "gate"
"""The point before a monitor checks that it holds the Lease."""


class CrashError(BaseException):
    """The monitor is killed here."""


@dataclass
class Sleep:
    """The point at which a monitor is stopped: a phase, or a gate after ``gates`` others."""

    at: str
    gates: int
    meanwhile: Callable[[], None]


@dataclass(eq=False)
class Monitor:
    """``win`` is the number of the last Lease that the monitor won, and may have lost since."""

    win: int
    core: MonitorCore


class Fleet:
    """``holder`` has the Lease; earlier monitors that are not dead are ``asleep``."""

    def __init__(self, make: Callable[[Authority], MonitorCore]) -> None:
        self._make = make
        self._wins = 0
        self.crash_at: str | None = None
        self.sleep: Sleep | None = None
        self.asleep: list[Monitor] = []
        failpoints.disable_all()  # of the fleet before: hypothesis makes one for each example
        failpoints.enable(failpoints.COMMIT, self._reached)
        self.holder = self._new()

    @property
    def core(self) -> MonitorCore:
        """The core of the Lease's holder."""
        return self.holder.core

    @contextmanager
    def undisturbed(self) -> Iterator[MonitorCore]:
        """Ask the holder without faults; planned faults stay planned."""
        coming = self.crash_at, self.sleep
        self.crash_at = self.sleep = None
        yield self.core
        self.crash_at, self.sleep = coming

    def restart(self, *, alive: bool) -> None:
        """Another monitor takes the Lease; the former holder is dead or only stopped."""
        if alive:
            self.asleep.append(self.holder)
        self.holder = self._new()

    def wake(self, pick: int) -> Monitor | None:
        """Resume a stopped monitor, which does not know that it lost the Lease."""
        return self.asleep[pick % len(self.asleep)] if self.asleep else None

    def win_again(self, monitor: Monitor) -> None:
        """A resumed monitor takes the Lease back, with its old state."""
        self.asleep.remove(monitor)
        self.asleep.append(self.holder)
        self._wins += 1
        monitor.win = self._wins
        self.holder = monitor

    def _new(self) -> Monitor:
        self._wins += 1
        found: list[Monitor] = []
        win = self._wins

        def gate() -> None:
            self._reached(GATE)
            if found and found[0].win != self._wins:
                raise errors.NotReadyError("another monitor holds the Lease")

        def term() -> int:
            return found[0].win if found else win

        core = self._make(Authority(gate=gate, term=term))
        found.append(Monitor(win, core))
        return found[0]

    def _reached(self, phase: str) -> None:
        if phase == self.crash_at:
            self.crash_at = None
            raise CrashError
        if self.sleep is None or phase != self.sleep.at:
            return
        if phase == GATE and self.sleep.gates > 0:
            self.sleep.gates -= 1
            return
        sleep, self.sleep, self.crash_at = self.sleep, None, None
        self.restart(alive=True)
        sleep.meanwhile()
