"""How fast copies go: slowly enough to leave the network to training, and done by the next save."""

import time
from collections.abc import Callable
from typing import Final

LEAST_BYTES_PER_SECOND: Final = 256 << 20
"""Of a process; more only where saves come faster than that."""

_SHARE: Final = 0.5  # of the time between two saves, in which what one has kept is copied
_LONGEST_SLEEP: Final = 0.5
_SHORTEST_SLEEP: Final = 0.02  # each wakes this thread and the receiver's, on cores that train


class Pace:
    """Spreads what one thread sends over time.

    Args:
        clock, sleep: of monotonic seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._seen: dict[str, tuple[int, float]] = {}  # bytes, and when they were whole
        self._rate = float(LEAST_BYTES_PER_SECOND)
        self._free = 0.0  # when the next byte may go

    @property
    def bytes_per_second(self) -> float:
        """The limit at present."""
        return self._rate

    def kept(self, name: str, size: int) -> None:
        """A file was kept; one of the same name at each save."""
        now = self._clock()
        before = self._seen.get(name)
        self._seen[name] = (size, now)
        if before is not None and now > before[1]:
            together = sum(size for size, _ in self._seen.values())
            needed = together / (_SHARE * (now - before[1]))
            self._rate = max(float(LEAST_BYTES_PER_SECOND), needed)

    def sent(self, count: int) -> None:
        """Wait until more than these bytes may go, or let some go before their time."""
        now = self._clock()
        self._free = max(self._free, now) + count / self._rate
        if self._free - now >= _SHORTEST_SLEEP:
            self._sleep(min(self._free - now, _LONGEST_SLEEP))
