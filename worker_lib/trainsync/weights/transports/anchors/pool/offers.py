"""Which explorer reads an object of the store, and which objects are kept for others; pure."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

READ_SECONDS: Final = 5.0
"""A reader that is silent for so long is taken for dead: the next explorer reads the object."""

KEEP_SECONDS: Final = 600.0
"""An object that no explorer asked for during that time is let go."""


class ReadAction(StrEnum):
    """How an explorer is to get an object."""

    READ = "read"  # from the store
    READ_FOR_ALL = "read_for_all"  # from the store, for the others, too
    WAIT = "wait"
    GET = "get"


@dataclass
class _Entry:
    reader: str | None = None  # for all
    heard_at: float = 0.0
    handle: Any = None
    bytes: int = 0
    asked_at: float = 0.0


@dataclass
class Offers:
    """Objects by key. Times are of one monotonic clock, in seconds."""

    _entries: dict[str, _Entry] = field(default_factory=dict)
    _explorers: dict[str, float] = field(default_factory=dict)  # when each asked last

    def take(self, key: str, explorer: str, now: float) -> tuple[ReadAction, Any]:
        """What ``explorer`` is to do, and the handle of an object that is there."""
        self._explorers[explorer] = now
        entry = self._entries.setdefault(key, _Entry())
        entry.asked_at = now
        if entry.handle is not None:
            return ReadAction.GET, entry.handle
        if entry.reader not in (None, explorer) and now - entry.heard_at < READ_SECONDS:
            return ReadAction.WAIT, None
        if not self._has_others(explorer, now):
            return ReadAction.READ, None  # nothing is worth keeping
        entry.reader, entry.heard_at = explorer, now
        return ReadAction.READ_FOR_ALL, None

    def heard(self, key: str, explorer: str, now: float) -> None:
        """The object's reader still reads."""
        entry = self._entries.get(key)
        if entry is not None and entry.reader == explorer:
            entry.heard_at = now

    def give(self, key: str, handle: Any, size: int, most: int, now: float) -> None:
        """An object is there from now on; those that were asked for least lately go for it.

        Args:
            size: its bytes.
            most: bytes that all of them may have.
        """
        self._entries[key] = _Entry(handle=handle, bytes=size, asked_at=now)
        there = sorted(
            (one for one in self._entries.items() if one[1].handle is not None),
            key=lambda one: (one[0] == key, one[1].asked_at),
        )
        used = sum(entry.bytes for _, entry in there)
        for name, entry in there:
            if used <= most:
                return
            used -= entry.bytes
            del self._entries[name]

    def give_up(self, key: str, explorer: str) -> None:
        """The object's reader does not read it any more."""
        entry = self._entries.get(key)
        if entry is not None and entry.reader == explorer:
            del self._entries[key]

    def handle(self, key: str) -> Any:
        """The handle of an object; None: it is not there."""
        entry = self._entries.get(key)
        return None if entry is None else entry.handle

    def forget(self, key: str) -> None:
        """The object could not be had by its handle."""
        self._entries.pop(key, None)

    def expire(self, now: float) -> bool:
        """Let go of what no explorer asked for lately; whether anything is left."""
        since = now - KEEP_SECONDS
        for key in [key for key, entry in self._entries.items() if entry.asked_at < since]:
            del self._entries[key]
        for name in [name for name, at in self._explorers.items() if at < since]:
            del self._explorers[name]
        return bool(self._entries)

    def _has_others(self, explorer: str, now: float) -> bool:
        since = now - KEEP_SECONDS
        return any(at >= since for name, at in self._explorers.items() if name != explorer)
