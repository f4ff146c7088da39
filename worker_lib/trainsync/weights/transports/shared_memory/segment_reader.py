"""Segments as an explorer reads them: mapped once, and locked only while a version in them is used.

A mapping is kept from version to version, for to map a model anew costs more than to digest it. The
lock is not: it says that a version is read, and goes with the last tensor that views it.
"""

import fcntl
import mmap
import os
import warnings
import weakref
from io import FileIO
from pathlib import Path
from typing import Final

import numpy as np
import torch

from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.transports.shared_memory.segment import SegmentGoneError

_KEPT: Final = 2  # the trainer writes two in turn

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork)


class _Mapping:
    """One segment's memory in this process."""

    def __init__(self, path: Path, file: FileIO, size: int) -> None:
        found = os.fstat(file.fileno())
        if found.st_size < max(1, size):
            raise SharedMemoryError(f"{path} has {found.st_size} bytes, expected {size}")
        self.file = file
        self.memory = mmap.mmap(
            file.fileno(), found.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
        )
        self._forks = _forks
        self._viewed: weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]] | None = None

    @property
    def reusable(self) -> bool:
        """Whether the lock is this process's alone, and no version in it is viewed any more."""
        return self._forks == _forks and (self._viewed is None or self._viewed() is None)

    @property
    def removed(self) -> bool:
        """Whether the trainer will never write to it again."""
        return os.fstat(self.file.fileno()).st_nlink == 0

    def view(self, size: int) -> torch.Tensor:
        """The bytes; the lock, which is there already, goes with the last tensor of them."""
        array = np.frombuffer(self.memory, dtype=np.uint8)
        self._viewed = weakref.ref(array)
        weakref.finalize(array, _unlock, self.file, self._forks).atexit = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)[:size]


class SegmentReader:
    """Maps segments, and remembers the last ones. One thread."""

    def __init__(self) -> None:
        self._kept: list[_Mapping] = []

    def map(self, path: Path, size: int) -> torch.Tensor:
        """The bytes of a segment, uint8 of shape (size,): no other version is ever begun in them.

        They cannot be written to: an attempt ends the process. The lock goes with the last tensor
        that views them.

        Raises:
            SegmentGoneError: there is no such segment any more, or its owner has it locked, to lay
                another version in it.
            SharedMemoryError: it is shorter, or it cannot be read.
        """
        self.forget_removed()
        try:
            found = path.lstat()
            mapping = self._known(found)
            file = mapping.file if mapping is not None else _open(path)
            _lock(path, file)
            if mapping is None:
                mapping = _Mapping(path, file, size)
                self._kept = [*self._kept, mapping][-_KEPT:]
        except FileNotFoundError as error:
            raise SegmentGoneError(f"{path} cannot be read: {error.strerror}") from error
        except BlockingIOError as error:
            raise SegmentGoneError(f"{path} is locked by its owner") from error
        except (OSError, ValueError) as error:
            raise SharedMemoryError(f"{path} cannot be mapped: {error}") from error
        return mapping.view(size)

    def forget_removed(self) -> None:
        """Give back the memory of segments that have no name any more, and no view."""
        self._kept = [mapping for mapping in self._kept if not mapping.removed]

    def _known(self, found: os.stat_result) -> _Mapping | None:
        for mapping in self._kept:
            if os.path.samestat(os.fstat(mapping.file.fileno()), found):
                if mapping.reusable and len(mapping.memory) == found.st_size:
                    return mapping
                self._kept.remove(mapping)
                break
        return None


def _open(path: Path) -> FileIO:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    return FileIO(os.open(path, flags), closefd=True)


def _lock(path: Path, file: FileIO) -> None:
    """Lock the open ``file`` for reading, if it still has the name ``path``."""
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        same = os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        same = False
    if not same:  # it may have been taken away before the lock was there
        fcntl.flock(file, fcntl.LOCK_UN)
        raise SegmentGoneError(f"{path} is gone: another version is laid in its memory")


def _unlock(file: FileIO, forks: int) -> None:
    """Unless a child may view the version too: then the lock goes when both have let go of it."""
    if forks == _forks:
        fcntl.flock(file, fcntl.LOCK_UN)
