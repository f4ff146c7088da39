"""A version's files in this host's memory, which fellows read while they still come."""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from trainsync.storage.layout import inside
from trainsync.storage.saves.receipts import FileEntry


class HoldingClosedError(Exception):
    """A newer version took the place of this one."""


def version_key(files: Sequence[FileEntry]) -> str:
    """The name of a version between agents: equal where all files are equal."""
    hasher = hashlib.sha256()
    for entry in files:
        hasher.update(f"{entry.path} {entry.bytes} {entry.digest}\n".encode())
    return hasher.hexdigest()


class Holding:
    """One version. One thread writes, any thread reads.

    Args:
        folder: made here, removed with `close`.
        files: of the manifest.

    Raises:
        OSError: the folder cannot be made.
        UnsafePathError: a path leads out of the folder.
    """

    def __init__(self, folder: Path, files: Sequence[FileEntry]) -> None:
        self.folder = folder
        self.files = tuple(files)
        self.key = version_key(files)
        self._there = [0] * len(files)
        self._changed = threading.Condition()
        self._closed = False
        self._paths = [inside(folder, entry.path) for entry in files]
        folder.mkdir(mode=0o700)
        try:
            for path in self._paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        except OSError:
            self.close()
            raise

    def path(self, index: int) -> Path:
        """The path of a file."""
        return self._paths[index]

    def wrote(self, index: int, end: int) -> None:
        """Note that a file's first ``end`` bytes are there; fewer, once the file begins anew."""
        with self._changed:
            self._there[index] = end
            self._changed.notify_all()

    def there(self, index: int, offset: int, deadline: float) -> int:
        """Count the bytes of a file that are there, once they are more than ``offset``.

        Args:
            deadline: on the monotonic clock; once past, the answer may be ``offset`` or less.

        Raises:
            HoldingClosedError: a newer version took the place of this one.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._there[index] > offset,
                max(0.0, deadline - time.monotonic()),
            )
            if self._closed:
                raise HoldingClosedError
            return self._there[index]

    def close(self) -> None:
        """Remove the files. Fellows that still read one get no more of it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        shutil.rmtree(self.folder, ignore_errors=True)


def open_for_reading(path: Path, offset: int) -> int:
    """A file descriptor at ``offset``; a symbolic link is not followed. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    os.lseek(fd, offset, os.SEEK_SET)
    return fd
