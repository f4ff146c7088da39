"""A bound on the bytes a second that a process puts into a store, over all of its uploads."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from trainsync.api.quantities import whole_bytes
from trainsync.storage.objects.requests.transfer import Block

LEAST: Final = 1 << 20
"""Bytes a second: with less a part of 8 MiB would take longer than a transfer may."""


class Bandwidth:
    """Thread-safe. A part goes once those before it have had their time, whichever upload's.

    Args:
        bytes_per_second: at least `LEAST`.
        clock, sleep: of monotonic seconds.
    """

    def __init__(
        self,
        bytes_per_second: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second: Final = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free = 0.0  # when the next part may go

    def paced(self, parts: Iterator[Block]) -> Iterator[Block]:
        """``parts``, each when it may go."""
        for part in parts:
            self._wait(len(part))
            yield part

    def _wait(self, count: int) -> None:
        with self._lock:
            now = self._clock()
            start = max(self._free, now)
            self._free = start + count / self.bytes_per_second
        if start > now:
            self._sleep(start - now)


_of_process: Final[dict[tuple[str, int], Bandwidth]] = {}
_making: Final = threading.Lock()  # the first uploads of a process begin at once


def of_process(store: str, bytes_per_second: int) -> Bandwidth:
    """The one bound of this process for the store of that URL."""
    with _making:
        key = (store, bytes_per_second)
        if key not in _of_process:
            _of_process[key] = Bandwidth(bytes_per_second)
        return _of_process[key]


def parse(text: str) -> int:
    """Bytes a second from a quantity such as ``200Mi``.

    Raises:
        ValueError: it is no quantity of bytes, or less than 1Mi.
    """
    try:
        found = whole_bytes(text)
    except ValueError:
        found = 0
    if found < LEAST:
        raise ValueError(f"{text!r}; expected a quantity of at least 1Mi, such as 200Mi")
    return found
