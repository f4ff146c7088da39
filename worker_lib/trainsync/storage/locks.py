"""Exclusive locks on files of the run's directory: held by flock(2), so they die with their holder.

A volume on which flock does not work (some network file systems) is no error: `Lock.held` is False
then, and callers say what still holds without it.
"""

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainsync.storage import atomic
from trainsync.storage.errors import LockTimeoutError

_LOG = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.02
_NOTE_BYTES: Final = 256
_UNSUPPORTED: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_TAKEN: Final = frozenset({errno.EACCES, errno.EAGAIN, errno.EINTR})


@dataclass(frozen=True)
class Lock:
    """A lock that was asked for; ``held`` is False where the volume has no locks.

    ``before`` is the note of the last holder, empty when there was none.
    """

    path: Path
    held: bool
    before: str = ""


@contextmanager
def exclusive(path: Path, timeout: float, note: str = "") -> Iterator[Lock]:
    """Hold ``path`` alone, among threads and processes; wait at most ``timeout`` seconds for it.

    Args:
        note: the holder's name, for the message of a process that waits in vain.

    Raises:
        LockTimeoutError: another process holds it; says which.
        OSError: the file cannot be opened.
    """
    with opened(path, timeout) as (fd, held):
        before = ""
        if held:
            before = os.pread(fd, _NOTE_BYTES, 0).decode(errors="replace")
            if before != note:
                os.ftruncate(fd, 0)
                os.pwrite(fd, note.encode()[:_NOTE_BYTES], 0)
        yield Lock(path, held, before)


@contextmanager
def opened(path: Path, timeout: float) -> Iterator[tuple[int, bool]]:
    """As `exclusive`, with the file's descriptor, to read and write it; and whether it is held."""
    atomic.make_directory(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, atomic.FILE_MODE)
    owner, held = os.getpid(), False
    try:
        info = os.fstat(fd)
        if stat.S_IMODE(info.st_mode) != atomic.FILE_MODE and info.st_uid == os.geteuid():
            os.fchmod(fd, atomic.FILE_MODE)  # the umask had taken the group's right
        held = _acquire(fd, path, timeout)
        yield fd, held
    finally:
        # Closing is not enough: a process forked meanwhile (a worker of a DataLoader) has the file
        # open too, and would hold the lock for as long as it lives. Nor may that process unlock.
        if held and os.getpid() == owner:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _acquire(fd: int, path: Path, timeout: float) -> bool:
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                _LOG.warning("%s: this volume has no file locks: %s", path, error)
                return False
            if error.errno not in _TAKEN:
                raise
        else:
            return True
        if time.monotonic() >= end:
            holder = os.pread(fd, _NOTE_BYTES, 0).decode(errors="replace") or "another process"
            raise LockTimeoutError(f"{path} is held by {holder}: not free within {timeout:g} s")
        time.sleep(_POLL_SECONDS)
