"""How much of this host's memory may be held for fellows: what staging leaves."""

import logging
import threading
from collections.abc import Callable

from trainsync.agent.metrics import AgentMetrics

_LOG = logging.getLogger(__name__)

RoomBeside = Callable[[int], int]
"""Bytes that are free besides what staging a version of about so many bytes takes; see
`StagingArea.room_beside`."""


class HeldMemory:
    """Counts what is held of one version, and tells where a version is not held. Any thread but for
    `begin`, which asks ``room`` in the thread that stages."""

    def __init__(self, room: RoomBeside, metrics: AgentMetrics) -> None:
        self._room = room
        self._metrics = metrics
        self._lock = threading.Lock()
        self._step = 0
        self._left = 0
        self._is_without = False
        self._told = False

    def begin(self, step: int, staged: int) -> None:
        """Another version is fetched; what was held of the one before is gone.

        Args:
            staged: bytes that it may have when it is staged, before a version was.
        """
        left = self._room(staged)
        with self._lock:
            self._told = self._is_without  # a version was held since: it is told of again
            self._step, self._left, self._is_without = step, left, False

    def take(self, size: int) -> bool:
        """Whether so many bytes more may be held."""
        with self._lock:
            left = self._left
            if size <= left:
                self._left -= size
                return True
        self.without(f"{size} bytes are needed, and staging leaves {max(0, left)}")
        return False

    def give_back(self, size: int) -> None:
        """So many bytes are held no more."""
        with self._lock:
            self._left += size

    def without(self, why: object) -> None:
        """The version is not held, or not all of it."""
        with self._lock:
            counted, told = self._is_without, self._told
            self._is_without = self._told = True
        if not counted:
            self._metrics.not_held()
        if not told:
            _LOG.warning(
                "version %d, and those after it while that is so, are not held for fellows: %s",
                self._step,
                why,
            )
