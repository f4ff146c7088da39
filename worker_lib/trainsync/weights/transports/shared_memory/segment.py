"""Memory that every process of a host sees: the trainer writes it, explorers read it in place.

A segment is a file of a memory file system. The kernel's file locks count its readers, also when a
process is killed, stopped or cut off: a reader of a version holds a shared lock until its last view
is gone, and the trainer writes another version only when it gets the exclusive lock. A version that
an explorer serves is therefore never written to, also when the network fails.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final

import numpy as np
import torch

from trainsync.weights.errors import SharedMemoryError

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - Linux mounts it there, in every container
"""Where segments lie by default."""

_ACCESS: Final = 0o600  # explorers run as the trainer's user, or read from the wire
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14 has it, the module mmap has not


class SegmentGoneError(SharedMemoryError):
    """The name is of a version that is over: the memory may be another's now."""


class SharedSegment:
    """One segment, by the process that writes it, which has it locked for writing at first.

    Args:
        path: of a file that does not exist.
        size: bytes. All of it is taken at once: a lack of memory shows here, and never as a signal
            that kills the writer or a reader.

    Raises:
        SharedMemoryError: it cannot be made, or there is no room for it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(path, flags, _ACCESS)
        except OSError as error:
            raise SharedMemoryError(f"{path} cannot be made: {error.strerror}") from error
        length = max(1, size)  # an empty file cannot be mapped
        try:
            if not self.lock():
                raise SharedMemoryError(f"{path} is locked by another process")
            os.posix_fallocate(self._file, 0, length)
            array = np.frombuffer(mmap.mmap(self._file, length), dtype=np.uint8)
            _populate(array)
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError):
                raise SharedMemoryError(
                    f"{path} cannot have {length} bytes: {error.strerror}"
                ) from error
            raise
        self.data = torch.from_numpy(array)[:size]

    def lock(self) -> bool:
        """Lock the segment for writing; False while it has a reader."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let others map it."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def rename(self, path: Path) -> None:
        """Rename the segment, so that explorers that know only the last name do not map it.

        Args:
            path: in the same folder.

        Raises:
            SharedMemoryError: it cannot be done.
        """
        try:
            self.path.rename(path)
        except OSError as error:
            raise SharedMemoryError(f"{self.path} cannot be renamed: {error.strerror}") from error
        self.path = path

    def remove(self) -> None:
        """Unlink the segment. Its memory is free when the last reader has let go."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.data = torch.empty(0, dtype=torch.uint8)


def _populate(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Map all pages at once: page by page, the first version would take four times as long.

    MAP_POPULATE does the same, but Python's lock is held meanwhile, half a second for each GiB, in
    which no thread could send a sign of life.

    Raises:
        OSError: there is no memory for it. A kernel that does not know the advice is none: then the
            pages, which are there already, are mapped when they are written to.
    """
    address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the lock
    if libc.madvise(address, size, _MADV_POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))


@dataclass(frozen=True)
class Room:
    """Bytes of a memory file system: all of them, those that are free, and those besides that
    others have reserved."""

    total: int
    free: int
    reserved: int


def room_of(folder: Path) -> Room | None:
    """The room of ``folder``'s file system, without taking any; None: it has no limit.

    What others have reserved is theirs: Ray would die of the signal that a page of its store brings
    when there is none left.
    """
    found = os.statvfs(folder)
    total = found.f_blocks * found.f_frsize
    if not total:  # one that is not limited says 0
        return None
    reserved = _reserved(folder)
    return Room(total, max(0, found.f_bavail * found.f_frsize - reserved), reserved)


def check_room(folder: Path, size: int) -> None:
    """Ask whether ``folder``'s file system has so many bytes left, without taking any.

    To take them and fail would leave nothing to others, the object store of Ray say, meanwhile.

    Raises:
        SharedMemoryError: it has less.
    """
    room = room_of(folder)
    if room is not None and room.free < size:
        raise SharedMemoryError(
            f"{folder} has no room for {size} bytes of weights ({room.free} of {room.total} are "
            f"free, besides {room.reserved} that others have reserved)"
        )


def _reserved(folder: Path) -> int:
    """Bytes of ``folder``'s file system that open files are long, and have not taken yet.

    Ray's object store is such a file: as long as it may become, and with no name, so that only the
    processes that have it open show it. Those of other users, or of other containers, do not.
    """
    folder = folder.resolve()  # the kernel names open files so; /dev/shm may be a link
    device = folder.stat().st_dev
    mount = next(place for place in (folder, *folder.parents) if place.is_mount())
    missing: dict[int, int] = {}  # by inode: several processes may have the same file open
    for files in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # another user's, or gone meanwhile
            for file in files.iterdir():
                with suppress(OSError):
                    # Asked first: to look at a file itself may wait for a server that is gone.
                    if file.readlink().is_relative_to(mount):
                        found = file.stat()
                        if found.st_dev == device and S_ISREG(found.st_mode):
                            missing[found.st_ino] = found.st_size - found.st_blocks * 512
    return sum(count for count in missing.values() if count > 0)
