"""Finds files of a save that have not changed since an older one: of this process, or of the
checkpoint that its attempt resumed from (`trainsync.checkpoint.save.places.resumed`).

A state is written to nowhere first: each block of its file is compared with that of the older file,
by digest, until one differs. So a state that changes costs next to nothing, and one that does not
some 0.1 s a GB, instead of its upload.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from trainsync.checkpoint.memory.kept import KeptFile
from trainsync.checkpoint.save.files.stream import buffered
from trainsync.checkpoint.save.places.comparing import Comparing
from trainsync.storage.block_digests import BlockDigests, BlockHasher
from trainsync.storage.saves.receipts import FileEntry, Participant

if TYPE_CHECKING:
    pass

LEAST: Final = 1 << 20
"""Bytes of a state: a smaller one is written again, which costs less than to keep it."""
_REMEMBERED: Final = 4
"""Saves of a participant that may have been committed since; the newest that was is what counts."""


@dataclass(frozen=True)
class KnownFile:
    """A file that a save has.

    ``step``: of that save. ``entries``: the file, and what lies beside it. ``places``: where each
    of them lies, as `Receipt.kept` says it. ``blocks``: the digests of its blocks. ``manifest``:
    the digest of the manifest that it was found in; None: the save is one of this process.
    """

    step: int
    entries: tuple[FileEntry, ...]
    places: tuple[str, ...]
    blocks: BlockDigests
    manifest: str | None = None


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


class _Comparing(Comparing):
    """Compares what is written with the blocks of ``file``."""

    def __init__(self, file: KnownFile, kept: KeptFile | None) -> None:
        super().__init__(kept)
        self._file = file
        self._hasher = BlockHasher(file.blocks.block)

    def _is_same(self, block: memoryview) -> bool:
        self._hasher.update(block)
        return not self._hasher.differs(self._file.blocks)

    def same(self) -> bool:
        """Whether all that was written is the file."""
        if self._differs or self._size != self._file.entries[0].bytes:
            return False
        self._hasher.finish()
        return not self._hasher.differs(self._file.blocks)


def is_unchanged(
    produce: Callable[[BinaryIO], object], file: KnownFile, kept: KeptFile | None = None
) -> bool:
    """Whether ``produce`` would write the very bytes of ``file``; False when the process ends.

    Args:
        kept: gets the same bytes, all of them where it is unchanged.
    """
    comparing = _Comparing(file, kept)
    with buffered(comparing) as gathering:
        produce(gathering)
    return comparing.same()
