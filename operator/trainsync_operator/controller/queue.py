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

    def __len__(self) -> int:
        """How many keys wait for a worker now."""
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Queue a key; a key in work is queued again when its work ends."""
        if key in self._active:
            self._again.add(key)
        else:
            self._waiting[key] = None

    def add_at(self, key: Key, when: float) -> None:
        """Queue a key at a time; of several times, the earliest counts."""
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
            self.add(key)
        if not self._waiting:
            return None
        key, _ = self._waiting.popitem(last=False)
        self._active.add(key)
        return key

    def done(self, key: Key) -> None:
        """The work on a key succeeded."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: Key, now: float) -> float:
        """The work on a key failed; the key is queued again after the returned seconds.

        The back-off doubles with each consecutive failure, up to a limit.
        """
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        wait = self._jitter(min(FIRST_RETRY_SECONDS * 2 ** min(count, 30), LAST_RETRY_SECONDS))
        # An event during the work does not skip the back-off: a failing key would spin.
        self._again.discard(key)
        self._active.discard(key)
        self.add_at(key, now + wait)
        return wait

    def _release(self, key: Key) -> None:
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._waiting[key] = None


def half_to_full(wait: float) -> float:
    """A random wait between half and all of ``wait``."""
    return wait * (0.5 + random.random() / 2)  # noqa: S311 -- spreads load, guards nothing


class WorkQueue(Generic[Key]):
    """`Backlog` for the tasks of one event loop."""

    def __init__(self) -> None:
        self._backlog: Backlog[Key] = Backlog(half_to_full)
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """How many keys wait for a worker now."""
        return len(self._backlog)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def add(self, key: Key) -> None:
        """See `Backlog.add`."""
        self._backlog.add(key)
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

    def failed(self, key: Key) -> float:
        """See `Backlog.failed`."""
        wait = self._backlog.failed(key, self._now())
        self._changed.set()
        return wait
