"""How long and how often requests to a store that is away are retried. Pure but for its clock."""

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_LOG = logging.getLogger(__name__)
_SLICE_SECONDS: Final = 0.5


@dataclass(frozen=True)
class RetryLimits:
    """Limits of the tries after the first one.

    The wait before the n-th is drawn evenly from half to all of ``first_wait_seconds * 2**n``, at
    most ``longest_wait_seconds``: so that ranks that met one outage do not come back together.

    Args:
        until: of ``clock``; no try begins later.
        tries: at most; None: as many as there is time for.
        stopped: asked twice a second whether nobody waits for the result any more.
        on_wait: told how many more seconds have gone by since the first failure.
    """

    until: float = math.inf
    tries: int | None = None
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 30.0
    stopped: Callable[[], bool] = lambda: False
    on_wait: Callable[[float], None] = lambda _: None
    sleep: Callable[[float], None] = field(default=time.sleep)
    clock: Callable[[], float] = field(default=time.monotonic)
    random: Callable[[], float] = field(default=random.random)

    def __post_init__(self) -> None:
        if self.tries is None and math.isinf(self.until):
            raise ValueError("expected a bound: until, or tries")

    def begin(self) -> "Tries":
        """The tries of one piece of work."""
        return Tries(self)


class Tries:
    """Counts the tries of one piece of work, and waits between them. For one thread."""

    def __init__(self, limits: RetryLimits) -> None:
        self._limits = limits
        self._done = 0
        self._wait = limits.first_wait_seconds
        self._told = math.nan  # until when `on_wait` was told

    def again(self, error: Exception) -> bool:
        """Wait after ``error``; False at once where no further try is left."""
        limits = self._limits
        now = limits.clock()
        pause = min(self._wait, limits.longest_wait_seconds) * (0.5 + limits.random() / 2)
        left = limits.until - now
        if self._done == limits.tries or pause > left or limits.stopped():
            return False
        if limits.tries is not None:
            _LOG.warning("%s; it is tried again", error)
        else:
            _LOG.warning(
                "%s; it is tried again in %.1f s, and given up in %.0f s", error, pause, left
            )
        self._done += 1
        self._wait *= 2
        self._told = now if math.isnan(self._told) else self._told
        end = now + pause
        while (rest := end - limits.clock()) > 0:
            limits.sleep(min(rest, _SLICE_SECONDS))
            self._tell()
            if limits.stopped():
                return False
        return True

    def _tell(self) -> None:
        now = self._limits.clock()
        self._limits.on_wait(now - self._told)
        self._told = now
