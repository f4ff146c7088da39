"""Finds files of a save that have not changed since an older one: of this process, or of the
checkpoint that its attempt resumed from (`trainsync.checkpoint.save.places.resumed`).

A state is written to nowhere first: each block of its file is compared with that of the older file,
by digest, until one differs. So a state that changes costs next to nothing, and one that does not
some 0.1 s a GB, instead of its upload.
"""

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from trainsync.checkpoint.memory.kept import KeptFile
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.files.stream import buffered
from trainsync.storage.block_digests import BlockDigests, BlockHasher
from trainsync.storage.saves.receipts import FileEntry, Participant

if TYPE_CHECKING:
    from typing_extensions import Buffer

LEAST: Final = 1 << 20
"""Bytes of a state: a smaller one is written again, which costs less than to keep it."""
_REMEMBERED: Final = 4
"""Saves of a participant that may have been committed since; the newest that was is what counts."""
_BLOCK: Final = 4 << 20


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


class _Comparing(io.RawIOBase):
    """Compares what is written with the blocks of ``file``, up to the first that differs."""

    def __init__(self, file: KnownFile, kept: KeptFile | None) -> None:
        self._file = file
        self._kept = kept
        self._hasher = BlockHasher(file.blocks.block)
        self._size = 0
        self._differs = False

    def writable(self) -> bool:
        return True

    def write(self, data: "Buffer", /) -> int:
        view = memoryview(data).cast("B")
        self._size += len(view)
        for start in range(0, len(view), _BLOCK):
            # Not an error at the first difference: torch would write on, and hide it.
            if self._differs or ending.over.is_set():
                self._differs = True
                break
            block = view[start : start + _BLOCK]
            self._hasher.update(block)
            if self._kept is not None:
                self._kept.write(block)
            self._differs = self._hasher.differs(self._file.blocks)
        return len(view)

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
