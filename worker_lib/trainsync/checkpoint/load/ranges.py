"""Parts of a checkpoint's files in a store: several ranges at once, each byte checked on its way.

A part is read in whole blocks, whose digests lie in a file beside it. A file without them (of one
block, of an older release, or copied from a volume) is read as a whole, and compared with its own
digest; so is one whose block differs, for the digests beside it may be what is wrong.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.stored import DifferentBytesError, StoredFiles
from trainsync.storage import block_digests
from trainsync.storage.block_digests import BlockDigests
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.parallel import for_each
from trainsync.storage.saves.receipts import FileEntry

if TYPE_CHECKING:
    from trainsync.checkpoint.load.resume import Resume

_LOG: Final = logging.getLogger(__name__)

AT_ONCE: Final = 8  # ranges of a rank that are in memory: a part of `Limits.part_bytes` each
_FILES_AT_ONCE: Final = 4

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """``into`` is filled with the bytes of the file ``path`` from ``start`` on."""

    path: str
    start: int
    into: memoryview

    @property
    def end(self) -> int:
        """Where the part ends in the file."""
        return self.start + len(self.into)


class Ranges:
    """Reads parts of the files of one checkpoint. For one thread.

    All methods raise:
        CorruptCheckpointError: a file is gone or differs; the run's monitor was told.
        StoreError: the store cannot be read.

    Attributes:
        fetched: bytes that came from the store.
    """

    def __init__(self, resume: "Resume", files: StoredFiles) -> None:
        self._resume = resume
        self._files = files
        self._entries = {entry.path: entry for entry in resume.manifest.files}
        self._blocks: dict[str, BlockDigests | None] = {}
        self._whole: dict[str, bytearray] = {}
        self._lock = threading.Lock()
        self.fetched = 0  # guarded by the lock

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._entry(path).bytes

    def block(self, path: str) -> int | None:
        """Bytes of the blocks in which a file is read; None: it is in memory as a whole."""
        self.prepare([path])
        blocks = self._blocks[path]
        return None if blocks is None else blocks.block

    def prepare(self, paths: Iterable[str]) -> None:
        """Have in memory the digests of the files' blocks; a file that has none as a whole."""
        new = [path for path in dict.fromkeys(paths) if path not in self._blocks]
        if not new:
            return
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="trainsync-fetch") as pool:
            blocks = self._telling(lambda: list(pool.map(self._read_blocks, new)))
            whole = [path for path, found in zip(new, blocks, strict=True) if found is None]
            data = self._telling(lambda: list(pool.map(self._read_whole, whole)))
        self._whole.update(zip(whole, data, strict=True))
        self._blocks.update(zip(new, blocks, strict=True))

    def forget(self) -> None:
        """Give the memory back."""
        self._blocks.clear()
        self._whole.clear()

    def read(self, parts: Iterable[Part]) -> None:
        """Fill each part."""
        parts = list(parts)
        self.prepare(part.path for part in parts)
        while True:
            try:
                return self._read(parts)
            except _BlockDiffersError as error:  # at most once of each file
                _LOG.warning("%s; the file is read as a whole", error)
                path = error.path
                # Damage is to be told of even where the file does not fit into memory.
                self._telling(lambda path=path: self._check_whole(path))  # type: ignore[misc]
                self._whole[path] = self._telling(lambda path=path: self._read_whole(path))  # type: ignore[misc]
                self._blocks[path] = None

    # -- inside -----------------------------------------------------------------------------

    def _read(self, parts: Iterable[Part]) -> None:
        windows: dict[tuple[str, int], list[Part]] = defaultdict(list)
        for part in parts:
            if part.end > self.size(part.path):
                raise CorruptCheckpointError(f"{part.path} has tensors beyond its end")
            blocks = self._blocks[part.path]
            if blocks is None:
                part.into[:] = memoryview(self._whole[part.path])[part.start : part.end]
                continue
            window = max(self._files.part_bytes // blocks.block, 1) * blocks.block
            for piece in _cut(part, window):
                windows[part.path, piece.start // window].append(piece)
        runs: list[tuple[BlockDigests, list[Part]]] = []
        for (path, _), pieces in windows.items():
            blocks = self._blocks[path]
            assert blocks is not None, "its pieces were copied"
            runs += [(blocks, run) for run in _runs(pieces, blocks.block)]
        if len(runs) == 1:
            self._telling(lambda: self._read_run(*runs[0]))
        else:
            self._telling(
                lambda: for_each(runs, lambda run, _: self._read_run(*run), AT_ONCE, "range")
            )

    def _entry(self, path: str) -> FileEntry:
        found = self._entries.get(path)
        return self._resume.entry(path) if found is None else found  # which raises

    def _read_blocks(self, path: str) -> BlockDigests | None:
        beside = self._entries.get(block_digests.beside(self._entry(path).path))
        if beside is None:
            return None
        data = self._files.read(beside)
        with self._lock:
            self.fetched += len(data)
        return block_digests.decode(data, self.size(path))

    def _check_whole(self, path: str) -> None:
        for _ in self._files.blocks(self._entry(path)):
            pass

    def _read_whole(self, path: str) -> bytearray:
        data = bytearray()
        for block in self._files.blocks(self._entry(path)):
            data += block
        with self._lock:
            self.fetched += len(data)
        return data

    def _read_run(self, blocks: BlockDigests, pieces: list[Part]) -> None:
        """Read the blocks that the pieces lie in, which follow one another, and fill the pieces."""
        path = pieces[0].path
        entry, block = self._entry(path), blocks.block
        first = pieces[0].start // block
        start = first * block
        end = min(-(-max(piece.end for piece in pieces) // block) * block, entry.bytes)
        data = self._files.range(entry, start, end)
        with self._lock:
            self.fetched += len(data)
        for number, at in enumerate(range(start, end, block), first):
            came = data[at - start : at - start + block]
            if not blocks.match(number, came):
                raise _BlockDiffersError(
                    f"{self._files.name(entry)} has another digest than expected in block {number} "
                    f"of {block} bytes",
                    path,
                )
            for piece in pieces:  # while the core's cache has the block
                _copy_overlap(Part(path, at, came), piece)

    def _telling(self, call: Callable[[], T]) -> T:
        """``call``, whose damage the run's monitor is told of."""
        try:
            return call()
        except _BlockDiffersError:
            raise
        except (ObjectMissingError, ObjectChangedError, DifferentBytesError) as error:
            raise self._resume.damaged(str(error)) from error


class _BlockDiffersError(DifferentBytesError):
    """A block of ``path``, or its digest, is not as it was saved."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


def _copy_overlap(block: Part, piece: Part) -> None:
    """Fill of ``piece`` what ``block`` has of it; other threads run meanwhile."""
    start, end = max(block.start, piece.start), min(block.end, piece.end)
    if start < end:
        np.copyto(
            np.frombuffer(piece.into, np.uint8)[start - piece.start : end - piece.start],
            np.frombuffer(block.into, np.uint8)[start - block.start : end - block.start],
        )


def _cut(part: Part, window: int) -> Iterator[Part]:
    """The pieces of a part in each window of the file."""
    start = part.start
    while start < part.end:
        end = min((start // window + 1) * window, part.end)
        yield Part(part.path, start, part.into[start - part.start : end - part.start])
        start = end


def _runs(pieces: Iterable[Part], block: int) -> Iterator[list[Part]]:
    """The pieces of a window by runs of blocks: between two runs is a block that no piece needs."""
    run: list[Part] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if run and piece.start // block > -(-end // block):
            yield run
            run = []
        run.append(piece)
        end = max(end, piece.end)
    if run:
        yield run
