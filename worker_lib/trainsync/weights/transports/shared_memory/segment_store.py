"""The trainer's segments: two are written in turn, and none outlives the trainer for long."""

import fcntl
import logging
import os
import re
import secrets
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.transports.shared_memory.segment import (
    SHARED_MEMORY,
    SharedSegment,
    check_room,
    room_of,
)

logger = logging.getLogger(__name__)

_PREFIX: Final = "trainsync-weights-"
_FOLDER: Final = re.compile(_PREFIX + r"\d+-[0-9a-f]{16}")
_PROBE: Final = "probe"
_NONCE_BYTES: Final = 32
SWEEP_SECONDS: Final = 60.0


class SegmentStore:
    """A folder of a memory file system, locked for as long as its owner lives. One thread.

    Args:
        parent: the memory file system. What dead trainers left in it is removed.
        attempt: shows in the folder's name.

    Raises:
        SharedMemoryError: it cannot be written to.
    """

    def __init__(self, parent: Path, attempt: int) -> None:
        remove_leftovers(parent)
        self._nonce = secrets.token_hex(_NONCE_BYTES // 2)
        self._numbers = 0
        self._published: SharedSegment | None = None
        self._spare: SharedSegment | None = None
        self._lock = -1
        self._folder = parent / f"{_PREFIX}{attempt}-{secrets.token_hex(8)}"
        try:
            self._lock = _make_locked(self._folder)
            (self._folder / _PROBE).write_text(self._nonce)
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._unlock()
            raise SharedMemoryError(f"{parent} cannot be used: {error.strerror}") from error

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._folder.name

    def proves(self, answer: object) -> bool:
        """Whether ``answer`` is what `read_probe` gives where this very memory is seen."""
        return isinstance(answer, str) and secrets.compare_digest(
            answer.encode(), self._nonce.encode()
        )

    def acquire(self, size: int) -> SharedSegment:
        """A segment without readers, which none can map for now; then `share` it.

        Explorers that are told its name may map it, but must not serve it before it is `publish`ed:
        until then the next call gives the same segment, if none has it mapped. It has a new name
        each time: an explorer that was stopped and hears of an older name finds nothing there.

        Raises:
            SharedMemoryError: there is no room for it.
        """
        self._spare = _fitting(self._spare, size)
        if self._spare is None and self._published is not None and self._published.lock():
            self._spare = _fitting(self._published, size)  # no explorer serves it any more
            self._published = None
        if self._spare is None:
            # One alone would be of no use: the next version needs another.
            check_room(self._folder, size if self._published is not None else 2 * size)
            self._spare = SharedSegment(self._fresh_path(), size)
            return self._spare
        try:
            self._spare.rename(self._fresh_path())
        except SharedMemoryError:
            self._spare.remove()
            self._spare = None
            raise
        return self._spare

    def room_beside(self, size: int) -> int:
        """Bytes that are free besides what `acquire` of ``size`` may take; below 0: it may fail."""
        room = room_of(self._folder)
        if room is None:
            return sys.maxsize
        if self._spare is not None and self._spare.size == size:
            return room.free
        return room.free - (size if self._published is not None else 2 * size)

    def share(self, segment: SharedSegment) -> str:
        """Let it be mapped from now on; returns its name, for `segment_path`."""
        segment.unlock()
        return f"{self.name}/{segment.path.name}"

    def publish(self, segment: SharedSegment) -> None:
        """Mark a segment as whole. The one before becomes the next to write."""
        if segment is not self._spare:
            raise ValueError(f"{segment.path} was not acquired last")
        self._published, self._spare = segment, self._published

    def close(self) -> None:
        """Remove all segments. Readers of a segment go on reading it."""
        for segment in (self._published, self._spare):
            if segment is not None:
                segment.remove()
        self._published = self._spare = None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._unlock()

    def _fresh_path(self) -> Path:
        self._numbers += 1
        return self._folder / str(self._numbers)

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _fitting(segment: SharedSegment | None, size: int) -> SharedSegment | None:
    """The segment, locked, if it may be written to and has this size; else it is removed."""
    if segment is not None and not (segment.size == size and segment.lock()):
        segment.remove()  # its readers keep the memory
        return None
    return segment


def read_probe(parent: Path, folder: str) -> str | None:
    """The proof that this process sees the trainer's memory; None if it does not.

    Host names and addresses prove nothing: pods of one node have memory of their own, and pods of
    two nodes may have the same name.
    """
    if not _FOLDER.fullmatch(folder):
        return None
    try:
        with (parent / folder / _PROBE).open() as probe:
            return probe.read(_NONCE_BYTES)
    except (OSError, UnicodeDecodeError):
        return None


def segment_path(parent: Path, name: str) -> Path:
    """Where a published segment lies.

    Raises:
        SharedMemoryError: no store gives such names.
    """
    folder, _, number = name.partition("/")
    if not _FOLDER.fullmatch(folder) or not re.fullmatch(r"\d+", number):
        raise SharedMemoryError(f"{name!r} is not the name of a segment")
    return parent / folder / number


class Sweeper:
    """Removes what dead trainers have left, now and then, in any process of a run. One thread.

    Args:
        parent: the memory file system.
        every: seconds between two looks.
        age: seconds for which a folder was not written to; a younger one may just be made.
    """

    def __init__(
        self, parent: Path = SHARED_MEMORY, every: float = SWEEP_SECONDS, age: float = SWEEP_SECONDS
    ) -> None:
        self._parent = parent
        self._every = every
        self._age = age
        self._next = 0.0

    def sweep(self) -> None:
        """If it is time again."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every
            remove_leftovers(self._parent, self._age)


def remove_leftovers(parent: Path, age: float = 0.0) -> None:
    """Remove the folders of this user's trainers that have died.

    A trainer that lives, or is stopped, has its folder locked. Readers of a segment go on reading
    it: its memory is free when the last one has let go.

    Args:
        age: seconds for which a folder was not written to.
    """
    with suppress(OSError):
        for folder in parent.iterdir():
            if _FOLDER.fullmatch(folder.name) and _is_left(folder, age):
                _remove_if_left(folder)


def _is_left(folder: Path, age: float) -> bool:
    with suppress(OSError):  # gone meanwhile
        found = folder.lstat()
        return found.st_uid == os.geteuid() and time.time() - found.st_mtime >= age
    return False


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # another user's, locked by its owner, or gone meanwhile
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            logger.info("removing %s, which a trainer that died has left", folder)
            shutil.rmtree(folder)
        finally:
            os.close(file)


def _make_locked(folder: Path) -> int:
    """Make ``folder`` and lock it; raises OSError also if it was taken for a leftover meanwhile."""
    folder.mkdir(mode=0o700)
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file
