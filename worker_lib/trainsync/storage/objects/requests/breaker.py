"""A circuit breaker: after a store was found away, calls fail at once for a while."""

import threading
import time
from collections.abc import Callable
from typing import Final

from trainsync.storage.objects.errors import StoreUnavailableError

_LONGEST_SECONDS: Final = 15.0


class Breaker:
    """Thread-safe. Each failure in a row doubles the pause, up to 15 s; one success ends it.

    Args:
        first_seconds: the first pause.
    """

    def __init__(self, first_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = first_seconds
        self._until = -float("inf")
        self._said = ""

    def check(self) -> None:
        """Pass, unless the store was away a moment ago.

        Raises:
            StoreUnavailableError: says what was said then.
        """
        with self._lock:
            if self._clock() < self._until:
                raise StoreUnavailableError(self._said)

    def failed(self, error: StoreUnavailableError) -> None:
        """A call was given up."""
        with self._lock:
            now = self._clock()
            if now < self._until:
                return  # of a call that was under way when another one failed
            self._said, self._until = str(error), now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)

    def succeeded(self) -> None:
        """The store has answered."""
        with self._lock:
            self._pause, self._until = self._first, -float("inf")
