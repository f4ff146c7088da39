"""Removes what other runs of this user, which are over, have left in memory."""

import fcntl
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from trainsync.checkpoint.memory.place import MemoryPlace

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 3600.0
"""A run that no process has used for so long is taken for over: its next start loads from disk."""

_ALIVE: Final = "alive"
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def hold(place: MemoryPlace) -> int:
    """Say, until the descriptor is closed or this process ends, that the run is alive.

    Raises:
        OSError: it cannot be said.
    """
    fd = os.open(place.directory / _ALIVE, _FLAGS, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(fd)
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(f"{place.directory} was removed meanwhile")
    except BaseException:
        os.close(fd)
        raise
    return fd


def sweep(place: MemoryPlace, idle_seconds: float = IDLE_SECONDS) -> None:
    """Remove the directories of other runs that no process holds and none has held of late.

    Raises:
        OSError: the directory cannot be read.
    """
    for directory in place.directory.parent.iterdir():
        if directory != place.directory:
            with suppress(OSError):  # it is alive, or none of ours
                _remove_if_over(directory, idle_seconds)


def forget_later(place: MemoryPlace, attempt: int, idle_seconds: float = IDLE_SECONDS) -> None:
    """Remove what attempts after ``attempt`` kept long ago: they were of a run whose directory was
    deleted, and which was begun anew under its name.

    Raises:
        OSError: the directory cannot be read.
    """
    for kept in place.files():
        path = place.path(kept)
        with suppress(FileNotFoundError):
            if kept.attempt > attempt and time.time() - path.lstat().st_mtime > idle_seconds:
                path.unlink()


def _remove_if_over(directory: Path, idle_seconds: float) -> None:
    """Remove it while its lock is held here: a process that starts now makes it anew.

    Raises:
        OSError: a process holds the run; or it is none.
    """
    fd = os.open(directory / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        used = max(os.fstat(fd).st_mtime, directory.stat().st_mtime)
        if time.time() - used > idle_seconds:
            logger.info("%s in memory belongs to a run that is over, and is removed", directory)
            shutil.rmtree(directory)
    finally:
        os.close(fd)
