"""Finds files of a save that have not changed since an older one: of this process, or of the
checkpoint that its attempt resumed from (`trainsync.checkpoint.save.places.resumed`).

A state is written to nowhere first: each block of its file is compared with that of the older file,
by digest. Of one that has changed in part, the blocks that have not are kept: torch puts each
tensor at the same place of the file while names, shapes and order are the same. Where that was of
no use the last time, the next file is compared up to the first block that differs. So a state that
changes costs next to nothing, and one that does not some 0.1 s a GB, instead of its upload.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO, Final

from trainsync.checkpoint.save.files.stream import buffered
from trainsync.checkpoint.save.places.comparing import Comparing
from trainsync.storage.block_digests import BlockDigests, BlockHasher
from trainsync.storage.saves.based import Base, Blocks
from trainsync.storage.saves.receipts import FileEntry, Participant

LEAST: Final = 1 << 20
"""Bytes of a state: a smaller one is written again, which costs less than to keep it."""
_MOST_CHANGED: Final = 0.75
"""Of a file's bytes: with more than these to be written it is written in full, and depends on no
older object."""
_MOST_THAT_STAYS: Final = 0.125
"""Of a file's bytes: so much is written again and again at most that could be in the base."""
_REMEMBERED: Final = 4
"""Saves of a participant that may have been committed since; the newest that was is what counts."""


@dataclass(frozen=True)
class KnownFile:
    """A file that a save has.

    ``step``: of that save. ``entries``: the file, and what lies beside it. ``places``: where each
    of them lies, as `Receipt.kept` says it. ``blocks``: the digests of its blocks. ``manifest``:
    the digest of the manifest that it was found in; None: the save is one of this process.
    ``base``: where the rest of the first file is, if its object has a part. ``shares``: whether the
    next one is compared although a block differs.
    """

    step: int
    entries: tuple[FileEntry, ...]
    places: tuple[str, ...]
    blocks: BlockDigests
    manifest: str | None = None
    base: Base | None = None
    shares: bool = True


class KnownFiles:
    """The files of the last saves of this process, by participant and path; for all threads.

    A process that starts begins with those of the checkpoint that its attempt resumed from.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[tuple[Participant, str], list[KnownFile]] = {}

    def add(self, participant: Participant, file: KnownFile) -> None:
        """A receipt speaks of the file from now on."""
        with self._lock:
            known = self._files.setdefault((participant, file.entries[0].path), [])
            known.append(file)
            del known[:-_REMEMBERED]

    def newest(
        self,
        participant: Participant,
        path: str,
        step: int,
        is_committed: Callable[[int], bool | None],
        resumed: Callable[[str], KnownFile | None] = lambda path: None,
    ) -> KnownFile | None:
        """The participant's file at ``path`` in its newest committed save before ``step``.

        None also where a newer save was aborted: the file that it named may be damaged.

        Args:
            is_committed: whether a save was committed or aborted; None: it has not ended.
            resumed: the file at a path of the checkpoint that the attempt resumed from; asked once,
                before the participant's first save.

        Raises:
            What ``is_committed`` and ``resumed`` raise.
        """
        with self._lock:
            known = self._files.get((participant, path))
        if known is None:
            found = resumed(path)
            with self._lock:
                known = self._files.setdefault((participant, path), [found] if found else [])
        for file in reversed(list(known)):
            is_done = file.manifest is not None or is_committed(file.step)
            committed = is_done if file.step < step else None
            if committed is False:
                return None
            if committed:
                with self._lock:  # older ones will not be asked for again
                    self._files[participant, path] = [
                        one for one in self._files[participant, path] if one.step >= file.step
                    ]
                return file
        return None


@dataclass(frozen=True)
class Compared:
    """A file to write, compared with an older one of the same ``size``: the digests of its
    ``blocks``, and the numbers of those that have ``changed``."""

    size: int
    blocks: BlockDigests
    changed: tuple[int, ...]


class _Comparing(Comparing):
    """Compares what is written with the blocks of ``file``, up to one too many that differs."""

    def __init__(self, file: KnownFile) -> None:
        super().__init__()
        self._file = file
        self._hasher = BlockHasher(file.blocks.block)
        self._changed: list[int] = []
        self._most = int(_MOST_CHANGED * file.blocks.count) if file.shares else 0

    def _is_same(self, block: memoryview) -> bool:
        self._hasher.update(block)
        self._changed += self._hasher.differing(self._file.blocks)
        return len(self._changed) <= self._most

    def compared(self) -> Compared | None:
        """None where too much differs, or the size."""
        if self._differs or self._size != self._file.entries[0].bytes:
            return None
        blocks = self._hasher.finish()
        self._changed += self._hasher.differing(self._file.blocks)
        if blocks is None or len(self._changed) > self._most:
            return None
        return Compared(self._size, blocks, tuple(self._changed))


def compare(produce: Callable[[BinaryIO], object], file: KnownFile) -> Compared | None:
    """Compare what ``produce`` would write with ``file``.

    None where too little would be kept, and when the process ends; with `KnownFile.shares` unset
    also at the first block that has changed.
    """
    comparing = _Comparing(file)
    with buffered(comparing) as gathering:
        produce(gathering)
    return comparing.compared()


def base_of(file: KnownFile, compared: Compared) -> Base | None:
    """Where the blocks are that have not changed since ``file``, for a new file with the others.

    None where it is to be written in full: too little would be kept; or much that has changed once,
    since the base was written, stays as it is by now, so that a new base has it for the next files.
    """
    size = compared.size
    changed = Blocks.of(size, compared.blocks.block, compared.changed)
    older = 0
    if file.base is not None:
        if file.base.block != changed.block:
            return None
        older = file.base.blocks(size).own
    own = replace(changed, own=changed.own | older)
    stays = replace(changed, own=older & ~changed.own)
    if size - own.own_bytes < max((1 - _MOST_CHANGED) * size, LEAST):
        return None
    if stays.own_bytes > _MOST_THAT_STAYS * size:
        return None
    return Base.of(file.places[0] if file.base is None else file.base.key, own)


def may_share(blocks: BlockDigests, older: KnownFile | None) -> bool:
    """Whether files after one with these ``blocks`` may be expected to keep a part of it: as this
    one could have of the ``older`` one. True where there is none, or one with other blocks."""
    if older is None or blocks.block != older.blocks.block:
        return True
    return blocks.alike(older.blocks) >= (1 - _MOST_CHANGED) * blocks.count
