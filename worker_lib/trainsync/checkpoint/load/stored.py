"""The files of a checkpoint in a store: fetched by the rank that needs them, checked on the way.

A file comes in ranges, several at once, and is compared with the manifest to its last bit while it
comes. A load keeps what it fetched in a directory of its own, which goes when the load ends.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from trainsync.storage import digest
from trainsync.storage.objects.bucket import Bucket
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError, StoreError
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.saves.receipts import FileEntry

if TYPE_CHECKING:
    from trainsync.checkpoint.load.resume import Resume

logger = logging.getLogger(__name__)
_FILES_AT_ONCE: Final = 4


class FileSources(Protocol):
    """A context in which files of a checkpoint are found; mapped tensors outlive it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def find(self, paths: Iterable[str]) -> None:
        """Find these files, several at once."""
        ...

    def in_memory(self, path: str) -> bool:
        """Whether the file is as the manifest says, to its last bit; else it is to be checked."""
        ...

    def path(self, path: str) -> Path:
        """Where to open a file, by its path relative to the step's directory."""
        ...

    def bytes(self, paths: Iterable[str]) -> tuple[int, int]:
        """How many bytes of these files are read from memory, and from elsewhere."""
        ...


@dataclass(frozen=True)
class StoredFiles:
    """The objects of a checkpoint in the store of ``url``: the key of each file's path.

    A copy in another process opens the store by that process's environment.
    """

    url: str
    keys: Mapping[str, str] = field(repr=False)

    def blocks(self, entry: FileEntry) -> Iterator[bytes]:
        """The bytes of a file, which are compared with the manifest when all have come.

        Raises:
            StoreError: the object is gone, or the store cannot be read.
            DifferentBytesError: it is not what the manifest says.
        """
        hasher = digest.new_hasher()
        for block in _open(self.url).blocks(self.keys[entry.path], entry.bytes):
            hasher.update(block)
            yield block
        found = digest.format_digest(hasher)
        if found != entry.digest:
            raise DifferentBytesError(
                f"{self.url}/{self.keys[entry.path]} has digest {found}, expected {entry.digest}"
            )

    def fetch(self, entry: FileEntry, target: Path) -> None:
        """Put a file at ``target``. Raises as `blocks`, and `OSError`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:  # also in the place of one whose fetch failed
            for block in self.blocks(entry):
                file.write(block)

    def read(self, entry: FileEntry) -> bytes:
        """The bytes of a small file. Raises as `blocks`."""
        return b"".join(self.blocks(entry))


class DifferentBytesError(StoreError):
    """A file's bytes are not those of the manifest."""


class StoredSources:
    """Fetches each file once into a directory of its own. See `FileSources`."""

    def __init__(self, resume: "Resume", files: StoredFiles) -> None:
        self._resume = resume
        self._files = files
        self._fetched: set[str] = set()

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="trainsync-load-"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def find(self, paths: Iterable[str]) -> None:
        """Fetch these files.

        Raises:
            CorruptCheckpointError: one is gone or differs; the run's monitor was told.
            StoreError: the store cannot be read.
        """
        new = sorted(set(paths) - self._fetched)
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="trainsync-fetch") as pool:
            for path, _ in zip(new, pool.map(self._fetch, new), strict=True):
                self._fetched.add(path)

    def in_memory(self, path: str) -> bool:
        """See `FileSources`: what was fetched was checked."""
        self.find([path])
        return True

    def path(self, path: str) -> Path:
        """See `FileSources`."""
        self.find([path])
        return self._directory / path

    def bytes(self, paths: Iterable[str]) -> tuple[int, int]:
        """See `FileSources`."""
        return 0, sum(self._resume.entry(path).bytes for path in paths)

    def _fetch(self, path: str) -> None:
        entry = self._resume.entry(path)
        target = self._directory / path
        try:
            self._files.fetch(entry, target)
        except (ObjectMissingError, ObjectChangedError, DifferentBytesError) as error:
            raise self._resume.damaged(str(error)) from error


@lru_cache(8)
def _opened(url: str, process: int) -> Bucket:
    del process  # a forked child has none of the threads behind a connection
    return open_run_store(url)


def _open(url: str) -> Bucket:
    return _opened(url, os.getpid())
