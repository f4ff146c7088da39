"""A work queue of keys: no duplicates, never two workers on one key, back-off for each key.

`Backlog` has the rules without time or tasks; `WorkQueue` adds a clock and lets workers wait.
"""

import asyncio
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 120.0


class Backlog(Generic[Key]):
    """Keys that are ready, in work, or delayed.

    ``jitter`` maps a back-off to a random one, so that many keys do not retry at the same time.
    """

    def __init__(self, jitter: Callable[[float], float]) -> None:
        self._jitter = jitter
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._active: set[Key] = set()
        self._again: set[Key] = set()
        self._later: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0
        self._failures: dict[Key, int] = {}
        self._edited: set[Key] = set()
        # Until when the API server has asked to wait with a key.
        self._not_before: dict[Key, float] = {}

    def __len__(self) -> int:
        """How many keys wait for a worker now."""
        return len(self._waiting)

    def add(self, key: Key, *, edited: bool = False) -> None:
        """Ask for a key; while it is worked on, it comes back right after.

        A key that failed keeps its back-off at news of its objects, as the status that tells of the
        failure is itself an event. ``edited`` ends the back-off: the user changed the spec. A wait
        that the API server has asked for holds then, too.
        """
        if edited:
            self._failures.pop(key, None)
        if key in self._active:
            self._again.add(key)
            if edited:
                self._edited.add(key)
        elif key in self._not_before:
            self._schedule(key, self._not_before[key])
        elif key not in self._failures:
            self._waiting[key] = None

    def add_at(self, key: Key, when: float) -> None:
        """Ask for a key at a time; of several times, the earliest counts.

        A key that failed already has its time.
        """
        if key not in self._failures:
            self._schedule(key, max(when, self._not_before.get(key, when)))

    def _schedule(self, key: Key, when: float) -> None:
        if when < self._later.get(key, float("inf")):
            self._later[key] = when
            self._serial += 1
            heapq.heappush(self._heap, (when, self._serial, key))

    def next_due(self) -> float | None:
        """The time of the earliest delayed key."""
        while self._heap and self._later.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Key | None:
        """A ready key, or None."""
        while (due := self.next_due()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._later[key]
            if key in self._active:
                self._again.add(key)
            else:
                self._waiting[key] = None
        if not self._waiting:
            return None
        key, _ = self._waiting.popitem(last=False)
        self._not_before.pop(key, None)
        self._active.add(key)
        return key

    def done(self, key: Key) -> None:
        """The work on a key succeeded."""
        self._failures.pop(key, None)
        self._edited.discard(key)
        self._release(key)

    def failures(self, key: Key) -> int:
        """How often in a row the work on a key has failed."""
        return self._failures.get(key, 0)

    def failed(
        self, key: Key, now: float, at_least: float = 0.0, at_most: float = LAST_RETRY_SECONDS
    ) -> float:
        """The work on a key failed; it comes back after the returned seconds.

        The wait doubles with each failure in a row, up to ``at_most``, and is ``at_least`` so long.
        Of a key that was edited meanwhile another spec has failed: it comes back as soon as it may.
        """
        if at_least > 0:
            self._not_before[key] = now + at_least
        if key in self._edited:
            self._edited.discard(key)
            wait = at_least
            if wait <= 0:
                self._release(key)
                return wait
        else:
            wait = max(self._backoff(key, at_most), at_least)
        # What happened meanwhile does not jump the back-off: it would make a failing key spin.
        self._again.discard(key)
        self._active.discard(key)
        self._later.pop(key, None)
        self._schedule(key, now + wait)
        return wait

    def _backoff(self, key: Key, at_most: float) -> float:
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        longest = min(at_most, LAST_RETRY_SECONDS)
        return self._jitter(min(FIRST_RETRY_SECONDS * 2 ** min(count, 30), longest))

    def _release(self, key: Key) -> None:
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._waiting[key] = None


def half_to_full(wait: float) -> float:
    """A random wait between half and all of ``wait``."""
    return wait * (0.5 + random.random() / 2)  # noqa: S311 -- spreads load, guards nothing


class WorkQueue(Generic[Key]):
    """`Backlog` for the tasks of one event loop.

    Args:
        now: the time in seconds; None: that of the event loop.
    """

    def __init__(
        self, backlog: Backlog[Key] | None = None, now: Callable[[], float] | None = None
    ) -> None:
        self._backlog: Backlog[Key] = Backlog(half_to_full) if backlog is None else backlog
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """How many keys wait for a worker now."""
        return len(self._backlog)

    def add(self, key: Key, *, edited: bool = False) -> None:
        """See `Backlog.add`."""
        self._backlog.add(key, edited=edited)
        self._changed.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key after ``seconds``."""
        self._backlog.add_at(key, self._now() + max(seconds, 0.0))
        self._changed.set()

    async def take(self) -> Key:
        """Wait for a key; call `done` or `failed` after the work."""
        while (key := self._backlog.take(self._now())) is None:
            self._changed.clear()
            due = self._backlog.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(due - self._now(), 0)):
                    await self._changed.wait()
            except TimeoutError:
                continue  # a delayed key is due
        self._changed.set()  # wake the other workers for the remaining keys
        return key

    def done(self, key: Key) -> None:
        """See `Backlog.done`."""
        self._backlog.done(key)
        self._changed.set()

    def failures(self, key: Key) -> int:
        """See `Backlog.failures`."""
        return self._backlog.failures(key)

    def failed(self, key: Key, at_least: float = 0.0, at_most: float = LAST_RETRY_SECONDS) -> float:
        """See `Backlog.failed`."""
        wait = self._backlog.failed(key, self._now(), at_least, at_most)
        self._changed.set()
        return wait
