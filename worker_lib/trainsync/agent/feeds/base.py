"""The protocol of a feed, which tells an agent of the newest version."""

import time
from collections.abc import Callable
from threading import Event
from typing import Protocol

from trainsync.agent.version import Version
from trainsync.weights.errors import WeightsError


class FeedError(WeightsError):
    """The newest version cannot be known now."""


class VersionFeed(Protocol):
    """Tells of the newest version. One thread; `close` is called from another one."""

    def next(self, after: Version | None, timeout: float) -> Version | None:
        """The newest version, once it `Version.follows` ``after``.

        None when no such version came for ``timeout`` seconds, in which the feed looked.

        Args:
            after: the version that is known; None: none is.

        Raises:
            FeedError: the newest version cannot be known now; ask again.
        """
        ...

    def close(self) -> None:
        """End all waiting."""
        ...


def look_until(
    newest: Callable[[Version | None], Version | None],
    after: Version | None,
    timeout: float,
    closed: Event,
    poll_seconds: float,
) -> Version | None:
    """`VersionFeed.next` by looking each ``poll_seconds``; None also once ``closed``."""
    deadline = time.monotonic() + timeout
    while True:
        found = newest(after)
        if found is not None and found.follows(after):
            return found
        left = deadline - time.monotonic()
        if left <= 0 or closed.wait(min(left, poll_seconds)):
            return None
