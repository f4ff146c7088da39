"""Memory of this host that may hold files for fellows: the part that staging leaves."""

import logging
import threading
from collections.abc import Callable

from trainsync.agent.metrics import AgentMetrics

_LOG = logging.getLogger(__name__)

RoomBeside = Callable[[int], int]
"""Bytes that are free besides those that staging a version of about so many bytes takes; see
`StagingArea.room_beside`."""


class HeldMemory:
    """Counts held bytes of one version, and warns of a version that is not held. Any thread but for
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
        """Begin another version; nothing is held of the version before.

        Args:
            staged: bytes of the version, about, for a memory in which none was staged yet.
        """
        left = self._room(staged)
        with self._lock:
            self._told = self._is_without  # after a version that was held, the next lack is logged
            self._step, self._left, self._is_without = step, left, False

    def take(self, size: int) -> bool:
        """Count so many bytes more as held, if they may be; whether they may."""
        with self._lock:
            left = self._left
            if size <= left:
                self._left -= size
                return True
        self.without(f"{size} bytes are needed, and staging leaves {max(0, left)}")
        return False

    def give_back(self, size: int) -> None:
        """Count so many bytes as held no more."""
        with self._lock:
            self._left += size

    def without(self, why: object) -> None:
        """Count the version as not held, or not all of it, and log why."""
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
