"""How often counts of a run's status are written; pure.

While the pods of a run come up, its counts change several times a second, and a write of a status
is the dearest request there is. What a person or a program acts on (phase, reasons, problems) is
written at once, as the Job controller batches its pods and not its conditions. When a thousand runs
start at once, counts wait longer: what has been written in the last minute says how long.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Generic, TypeVar

SECONDS: Final = 2
"""At least, between two writes of one run of which the second changes counts alone."""
LONGEST_SECONDS: Final = 30
_WINDOW: Final = timedelta(seconds=60)
# As many writes in a minute lengthen the wait by a second: 9 writes a second make it the longest.
_WRITES_A_SECOND_OF_WAIT: Final = 18
_COUNTS: Final = ("pods", "explorerReplicas", "readyClusters", "readyServers", "monitor")
_OF_ENTRIES: Final = {
    "clusters": ("readyWorkers", "jobStatus"),
    "servers": ("readyReplicas", "updatedReplicas"),
}
# Reasons of conditions whose message says what is ready, and how far the job's start has come.
_COUNTING: Final = ("Waiting", "NotAllReady", "JobStarting")

Key = TypeVar("Key", bound=Hashable)


@dataclass
class Pace(Generic[Key]):
    """Remembers when each run's status was written, and the counts that wait."""

    _written: dict[Key, datetime] = field(default_factory=dict)
    _waiting: dict[Key, datetime] = field(default_factory=dict)
    # The writes of all runs, oldest first.
    _recent: deque[datetime] = field(default_factory=deque)

    def waits(self, key: Key, before: dict[str, Any], mine: dict[str, Any], now: datetime) -> bool:
        """Whether a status stays as it is for now; `due` says when it is written."""
        self._waiting.pop(key, None)
        last = self._written.get(key)
        if last is None or not counts_alone(before, mine):
            return False
        free = last + self._interval(now)
        if not last <= now < free:
            return False
        self._waiting[key] = free
        return True

    def wrote(self, key: Key, now: datetime) -> None:
        """A run's status was written."""
        self._written[key] = now
        self._recent.append(now)

    def _interval(self, now: datetime) -> timedelta:
        while self._recent and not now - _WINDOW < self._recent[0] <= now:
            self._recent.popleft()
        seconds = len(self._recent) / _WRITES_A_SECOND_OF_WAIT
        return timedelta(seconds=min(max(SECONDS, seconds), LONGEST_SECONDS))

    def due(self, key: Key) -> list[datetime]:
        """When to look at a run again, whose counts wait."""
        return [self._waiting[key]] if key in self._waiting else []

    def gone(self, key: Key) -> None:
        """Forget a run."""
        self._written.pop(key, None)
        self._waiting.pop(key, None)


def counts_alone(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two of the operator's statuses differ in counts, and in words about them, alone."""
    return before != after and _without_counts(before) == _without_counts(after)


def _without_counts(mine: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in mine.items() if key not in _COUNTS}
    for key, counts in _OF_ENTRIES.items():
        if key in kept:
            kept[key] = [{k: v for k, v in e.items() if k not in counts} for e in kept[key]]
    kept["conditions"] = [
        {**each, "message": ""} if each["reason"] in _COUNTING else each
        for each in mine["conditions"]
    ]
    return kept
