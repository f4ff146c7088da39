"""The files that one load reads: which of them lie in memory, whole; the rest is on the volume, or
in the store.

No name is trusted: what a load takes from memory has the size and the digest that the manifest of
the committed step says. Anything else is as if it were not there.
"""

import logging
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from trainsync.checkpoint.load.account import LoadedBytes
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.memory.reuse import open_whole
from trainsync.storage import digest
from trainsync.storage.saves.receipts import FileEntry

logger = logging.getLogger(__name__)

_OPENED: Final = Path("/proc/self/fd")  # of Linux; elsewhere nothing is found
_THREADS: Final = 4
_BLOCK: Final = 512 << 10


class Sources:
    """A context in which files of a checkpoint are found; tensors that are mapped outlive it.

    A file in memory is opened once, read to its last bit, and used through what was opened: a name
    may be given to other bytes meanwhile, or dropped.
    """

    def __init__(self, resume: Resume) -> None:
        self._resume = resume
        self._opened: dict[str, int | None] = {}  # descriptor by path; None: on the volume
        self._glanced: dict[str, int] = {}  # the same, of files whose bytes were not compared
        self._fetched: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; no path of memory may be opened any more."""
        for fd in (*self._opened.values(), *self._glanced.values()):
            if fd is not None:
                os.close(fd)
        self._opened.clear()
        self._glanced.clear()

    def find(self, paths: Iterable[str]) -> None:
        """Look for these files in memory, several at once."""
        place = self._resume.memory if _OPENED.is_dir() else None
        new = sorted(set(paths) - self._opened.keys())
        if place is None or not new:
            return
        entries = {path: self._resume.entry(path) for path in new}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="trainsync-memory") as pool:
            found = pool.map(
                lambda path: _open(place, entries[path], self._glanced.pop(path, None)), new
            )
            self._opened.update(zip(new, found, strict=True))

    def find_again(self, paths: Iterable[str], fetched: Iterable[str]) -> None:
        """Look once more for those that were not there; ``fetched`` have come since from other
        pods' memory."""
        again = {path for path in paths if self._opened.get(path, 0) is None}
        for path in again:
            del self._opened[path]
        self.find(again)
        self._fetched.update(path for path in fetched if self.in_memory(path))

    def in_memory(self, path: str) -> bool:
        """Whether the file was found in memory: it is as the manifest says, to the last bit."""
        self.find([path])
        return self._opened.get(path) is not None

    def path(self, path: str) -> Path:
        """Where to open a file of the checkpoint, by its path relative to the step's directory.

        Of a run in a store only what is in memory can be opened.
        """
        if self.in_memory(path):
            return _OPENED / str(self._opened[path])
        return self._resume.path / path

    def glance(self, path: str) -> Path:
        """As `path`, of a file whose bytes need not be as the manifest says before `find`.

        For what files say of themselves, where only that tells which of them are read.
        """
        place = self._resume.memory if _OPENED.is_dir() else None
        if path not in self._opened and path not in self._glanced and place is not None:
            fd = _glance(place, self._resume.entry(path))
            if fd is not None:
                self._glanced[path] = fd
        if path in self._glanced:
            return _OPENED / str(self._glanced[path])
        return self.path(path)

    def only_glanced(self, paths: Iterable[str]) -> bool:
        """Whether one of these files lies in memory, and its bytes were not compared yet."""
        return not self._glanced.keys().isdisjoint(paths)

    def bytes(self, paths: Iterable[str]) -> LoadedBytes:
        """Where the bytes of these files are read."""
        read = LoadedBytes()
        for path in paths:
            size = self._resume.entry(path).bytes
            if self.in_memory(path):
                read += LoadedBytes(memory=size, neighbour=size if path in self._fetched else 0)
            else:
                read += LoadedBytes(volume=size)
        return read


def _open(place: MemoryPlace, entry: FileEntry, glanced: int | None = None) -> int | None:
    """A descriptor of the entry's file in memory, if one is there that is what it must be.

    Args:
        glanced: a descriptor of a file that may be.
    """
    if glanced is None:
        return _find(place, entry)
    if _is_whole(glanced, entry):
        return glanced
    try:
        return _find(place, entry)
    finally:
        os.close(glanced)  # only now: another file with its number would be taken for it


def _find(place: MemoryPlace, entry: FileEntry) -> int | None:
    for path, fd in _candidates(place, entry):
        try:
            problem = _problem(fd, entry)
        except OSError as error:
            problem = f"cannot be read: {error}"
        except BaseException:
            os.close(fd)
            raise
        if problem is None:
            return fd
        os.close(fd)
        logger.warning("%s is not read from memory: %s %s", entry.path, path, problem)
    return None


def _is_whole(fd: int, entry: FileEntry) -> bool:
    try:
        return _problem(fd, entry) is None
    except OSError:
        return False  # it is looked at again


def _glance(place: MemoryPlace, entry: FileEntry) -> int | None:
    """A descriptor of a file in memory with the entry's digest as its name, and its size."""
    for _, fd in _candidates(place, entry):
        if _misfit(os.fstat(fd), entry) is None:
            return fd
        os.close(fd)
    return None


def _candidates(place: MemoryPlace, entry: FileEntry) -> Iterator[tuple[Path, int]]:
    """Path and descriptor of each file that has the entry's digest as its name."""
    places = [place] if place.guests is None else [place, place.guests]
    try:
        found = [
            one.path(kept) for one in places for kept in one.files() if kept.digest == entry.digest
        ]
    except OSError as error:
        logger.warning("%s is not read from memory, which cannot be used: %s", entry.path, error)
        return
    for path in found:
        try:
            fd = open_whole(path)
        except OSError as error:
            logger.warning("%s is not read from memory: %s", entry.path, error)
            continue
        yield path, fd


def _problem(fd: int, entry: FileEntry) -> str | None:
    misfit = _misfit(os.fstat(fd), entry)
    if misfit is not None:
        return misfit
    hasher = digest.new_hasher()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    done = 0
    while done < entry.bytes and (count := os.preadv(fd, [buffer], done)):
        hasher.update(view[:count])
        done += count
    found = digest.format_digest(hasher)
    return None if found == entry.digest else f"has digest {found}, expected {entry.digest}"


def _misfit(about: os.stat_result, entry: FileEntry) -> str | None:
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        return "is not a file of this user"
    if about.st_size != entry.bytes:
        return f"has {about.st_size} bytes, expected {entry.bytes}"
    return None
