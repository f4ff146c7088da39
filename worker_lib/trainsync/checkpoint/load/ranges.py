"""Parts of a checkpoint's files in a store: several ranges at once, each byte checked on its way.

A part is read in whole blocks, whose digests lie in a file beside it. A file without them (of an
older release, or copied from a volume) is read through once for them, and compared with its own
digest; so is one whose block differs twice, for the digests beside it may be what is wrong.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.stored import DifferentBytesError, StoredFiles
from trainsync.storage import block_digests
from trainsync.storage.block_digests import BlockDigests, BlockHasher
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.parallel import for_each
from trainsync.storage.saves.receipts import FileEntry

if TYPE_CHECKING:
    from trainsync.checkpoint.load.resume import Resume

_LOG: Final = logging.getLogger(__name__)

AT_ONCE: Final = 8  # ranges of a rank that are in memory: a part of `Limits.part_bytes` each
_FILES_AT_ONCE: Final = 4
_DAMAGE: Final = (ObjectMissingError, ObjectChangedError, DifferentBytesError)

T = TypeVar("T")


@dataclass(frozen=True)
class FileRange:
    """``into`` is filled with the bytes of the file ``path`` from ``start`` on."""

    path: str
    start: int
    into: memoryview

    @property
    def end(self) -> int:
        """Where the part ends in the file."""
        return self.start + len(self.into)


class Ranges:
    """Reads parts of the files of one checkpoint.

    For one thread, but that several may `read` different files, which `prepare` was given before.

    All methods raise:
        CorruptCheckpointError: a file is gone or differs, and the run's monitor was told; or it has
            tensors beyond its end.
        StoreError: the store cannot be read.

    Attributes:
        fetched: bytes that came from the store.
    """

    def __init__(self, resume: "Resume", files: StoredFiles) -> None:
        self._resume = resume
        self._files = files
        self._entries = {entry.path: entry for entry in resume.manifest.files}
        self._blocks: dict[str, BlockDigests] = {}
        self._read_through: set[str] = set()  # guarded by the lock
        self._lock = threading.Lock()
        self.fetched = 0  # guarded by the lock

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._entry(path).bytes

    def block(self, path: str) -> int:
        """Bytes of the blocks in which a file is read."""
        self.prepare([path])
        return self._blocks[path].block

    def prepare(self, paths: Iterable[str]) -> None:
        """Have in memory the digests of the files' blocks."""
        new = [path for path in dict.fromkeys(paths) if path not in self._blocks]
        if not new:
            return
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="trainsync-fetch") as pool:
            found = self._telling(lambda: list(pool.map(self._find_blocks, new)))
        self._blocks.update(zip(new, found, strict=True))

    def forget(self) -> None:
        """Give the memory back."""
        self._blocks.clear()

    def read(self, parts: Iterable[FileRange]) -> None:
        """Fill each part."""
        parts = list(parts)
        self.prepare(part.path for part in parts)
        while True:
            try:
                return self._read(parts)
            except _BlockDiffersError as error:
                # Its digests are those of the whole file, which was as it should be: now it is not.
                if error.path in self._read_through:
                    raise self._resume.damaged(str(error)) from error
                _LOG.warning("%s; the file is read through", error)
                entry = self._entry(error.path)
                self._blocks[entry.path] = self._telling(partial(self._digest_blocks, entry))

    # -- inside -----------------------------------------------------------------------------

    def _read(self, parts: Iterable[FileRange]) -> None:
        windows: dict[tuple[str, int], list[FileRange]] = defaultdict(list)
        for part in parts:
            if part.end > self.size(part.path):
                raise CorruptCheckpointError(f"{part.path} has tensors beyond its end")
            block = self._blocks[part.path].block
            window = max(self._files.part_bytes // block, 1) * block
            for piece in _cut(part, window):
                windows[part.path, piece.start // window].append(piece)
        runs = [
            run
            for (path, _), pieces in windows.items()
            for run in _runs(pieces, self._blocks[path].block)
        ]
        if len(runs) == 1:
            self._telling(lambda: self._read_run(runs[0]))
        else:
            self._telling(
                lambda: for_each(runs, lambda run, _: self._read_run(run), AT_ONCE, "range")
            )

    def _entry(self, path: str) -> FileEntry:
        found = self._entries.get(path)
        return self._resume.entry(path) if found is None else found  # which raises

    def _find_blocks(self, path: str) -> BlockDigests:
        entry = self._entry(path)
        found = self._blocks_beside(entry)
        if found is None and entry.bytes <= block_digests.BLOCK:
            found = block_digests.of_one_block(entry.digest)
        return self._digest_blocks(entry) if found is None else found

    def _blocks_beside(self, entry: FileEntry) -> BlockDigests | None:
        beside = self._entries.get(block_digests.beside(entry.path))
        if beside is None:
            return None
        try:
            data = self._files.read(beside)
        except _DAMAGE as error:  # the file itself may be sound
            _LOG.warning("%s; %s is read through", error, self._files.name(entry))
            return None
        self._count(len(data))
        return block_digests.decode(data, entry.bytes)

    def _digest_blocks(self, entry: FileEntry) -> BlockDigests:
        """Those of the bytes that are there, which are compared with the file's own digest."""
        hasher = BlockHasher()
        for block in self._files.blocks(entry):
            hasher.update(memoryview(block))
            self._count(len(block))
        with self._lock:
            self._read_through.add(entry.path)
        found = hasher.finish()
        return block_digests.of_one_block(entry.digest) if found is None else found

    def _read_run(self, pieces: list[FileRange]) -> None:
        """Read the blocks that the pieces lie in, which follow one another, and fill the pieces."""
        try:
            self._try_run(pieces)
        except _BlockDiffersError as error:  # perhaps on its way alone
            _LOG.warning("%s; it is read again", error)
            self._try_run(pieces)

    def _try_run(self, pieces: list[FileRange]) -> None:
        path = pieces[0].path
        entry, blocks = self._entry(path), self._blocks[path]
        block = blocks.block
        first = pieces[0].start // block
        start = first * block
        end = min(-(-max(piece.end for piece in pieces) // block) * block, entry.bytes)
        data = self._files.range(entry, start, end)
        self._count(len(data))
        for number, at in enumerate(range(start, end, block), first):
            came = data[at - start : at - start + block]
            if not blocks.match(number, came):
                raise _BlockDiffersError(
                    f"{self._files.name(entry)} has another digest than expected in block {number} "
                    f"of {block} bytes",
                    path,
                )
            for piece in pieces:  # while the core's cache has the block
                _copy_overlap(FileRange(path, at, came), piece)

    def _count(self, size: int) -> None:
        with self._lock:
            self.fetched += size

    def _telling(self, call: Callable[[], T]) -> T:
        """``call``, whose damage the run's monitor is told of."""
        try:
            return call()
        except _BlockDiffersError:
            raise
        except _DAMAGE as error:
            raise self._resume.damaged(str(error)) from error


class _BlockDiffersError(DifferentBytesError):
    """A block of ``path``, or its digest, is not as it was saved."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


def _copy_overlap(block: FileRange, piece: FileRange) -> None:
    """Fill of ``piece`` what ``block`` has of it; other threads run meanwhile."""
    start, end = max(block.start, piece.start), min(block.end, piece.end)
    if start < end:
        np.copyto(
            np.frombuffer(piece.into, np.uint8)[start - piece.start : end - piece.start],
            np.frombuffer(block.into, np.uint8)[start - block.start : end - block.start],
        )


def _cut(part: FileRange, window: int) -> Iterator[FileRange]:
    """The pieces of a part in each window of the file."""
    start = part.start
    while start < part.end:
        end = min((start // window + 1) * window, part.end)
        yield FileRange(part.path, start, part.into[start - part.start : end - part.start])
        start = end


def _runs(pieces: Iterable[FileRange], block: int) -> Iterator[list[FileRange]]:
    """The pieces of a window by runs of blocks: between two runs is a block that no piece needs."""
    run: list[FileRange] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if run and piece.start // block > -(-end // block):
            yield run
            run = []
        run.append(piece)
        end = max(end, piece.end)
    if run:
        yield run
