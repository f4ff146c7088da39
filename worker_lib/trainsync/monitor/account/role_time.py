"""The seconds of one role's pods, divided into classes. Pure.

Time is a line. Up to a point on it, `RoleLedger.until`, all is divided; beyond it only the number
of pods is known. `RoleLedger.settle` moves the point and never back, so no second is counted twice
and none is left out: the classes always sum up to the pods' time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from pydantic import ConfigDict

from trainsync.api.status import AccountClass
from trainsync.storage.records import RECORD_CONFIG

MOST_CHANGES: Final = 1024
"""Changes of the number of pods that are kept for what is not settled yet."""
_LEAST: Final = 1e-9


@dataclass(frozen=True)
class Pods:
    """From ``time`` on: weight of the pods that hold their resources, and of those that wait.

    The weight of a pod is its GPUs, or 1 in a run without GPUs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = RECORD_CONFIG

    time: float
    held: float
    waiting: float


@dataclass
class RoleLedger:
    """See the module's docstring. Times are seconds on the account's clock.

    Args:
        pods: the first holds from `until` on.
        seconds: settled so far, by class.
    """

    __pydantic_config__: ClassVar[ConfigDict] = RECORD_CONFIG

    pods: list[Pods]
    seconds: dict[AccountClass, float] = field(default_factory=dict)

    @property
    def until(self) -> float:
        """Up to here every second is in a class."""
        return self.pods[0].time

    @property
    def total(self) -> float:
        """Seconds of all classes."""
        return sum(self.seconds.values())

    @property
    def full(self) -> bool:
        """Whether no change of pods is taken before something is settled."""
        return len(self.pods) >= MOST_CHANGES

    def observe(self, time: float, held: float, waiting: float) -> None:
        """So many pods are there from ``time`` on; a time before the last change counts as it."""
        last = self.pods[-1]
        if (held, waiting) == (last.held, last.waiting):
            return
        if time <= last.time:
            self.pods[-1] = Pods(last.time, held, waiting)
        else:
            self.pods.append(Pods(time, held, waiting))

    def settle(self, time: float, parts: Mapping[AccountClass, float]) -> None:
        """Put what pods held until ``time`` into classes, in proportion to ``parts``.

        What waited for a node goes to ``queue``. Parts of less than a nanosecond count as 0;
        without any other all goes to ``idle``. A time that is settled already changes nothing.
        """
        if time <= self.until:
            return
        held = waiting = 0.0
        ends = [*(pods.time for pods in self.pods[1:]), time]
        for pods, end in zip(self.pods, ends, strict=True):
            length = max(min(end, time) - pods.time, 0.0)
            held += pods.held * length
            waiting += pods.waiting * length
        known = [pods for pods in self.pods if pods.time <= time]
        self.pods = [
            Pods(time, known[-1].held, known[-1].waiting),
            *(pods for pods in self.pods if pods.time > time),
        ]
        self._add(AccountClass.QUEUE, waiting)
        found = {kind: part for kind, part in parts.items() if part > _LEAST}
        every = sum(found.values())
        if not every:
            found, every = {AccountClass.IDLE: 1.0}, 1.0
        for kind, part in found.items():
            self._add(kind, held * (part / every))

    def _add(self, kind: AccountClass, seconds: float) -> None:
        if seconds > 0:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds


@dataclass
class RemoteClock:
    """Another process's clock, which tells how long a loop has run, on the account's time line.

    A message is late, never early: so the least difference that was seen is the best.
    """

    __pydantic_config__: ClassVar[ConfigDict] = RECORD_CONFIG

    origin: float
    seconds: float = 0.0

    @classmethod
    def begin(cls, now: float, seconds: float) -> "RemoteClock":
        """A clock whose loop began so many seconds before ``now``."""
        return cls(now - seconds)

    def place(self, now: float, seconds: float) -> float:
        """The time at which the clock showed ``seconds``, told at ``now``."""
        self.origin = min(self.origin, now - seconds)
        self.seconds = seconds
        return min(self.origin + seconds, now)
