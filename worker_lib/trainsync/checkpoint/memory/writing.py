"""Puts the file of a state into memory, and gives its bytes from there to the run's storage.

Memory comes first: a part is whole there long before the volume or the store has it, and what
outlives the rank (`trainsync.checkpoint.rescue.process`) can write the rest.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from trainsync.checkpoint.errors import SaveAbandonedError
from trainsync.checkpoint.memory.kept import Describe, KeptFile, SealedFile
from trainsync.checkpoint.memory.reuse import open_whole
from trainsync.checkpoint.save.files.stream import Digesting, buffered

_BLOCK: Final = 4 << 20


class FileInMemory:
    """A whole file in memory, open to be read: its bytes stay until it is closed.

    Raises:
        OSError: it was dropped, maybe just now, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = open_whole(path)

    def produce(self, file: BinaryIO, check: Callable[[], None] = lambda: None) -> None:
        """Write all of its bytes into ``file``. Raises `OSError`.

        Args:
            check: called before each few megabytes.
        """
        buffer = memoryview(bytearray(_BLOCK))
        done = 0
        while count := os.preadv(self._fd, [buffer], done):
            check()
            file.write(buffer[:count])
            done += count

    def close(self) -> None:
        """Close it; it stays in memory."""
        os.close(self._fd)


def put_into_memory(
    kept: KeptFile,
    produce: Callable[[BinaryIO], object],
    describe: Describe,
) -> SealedFile | None:
    """Write what ``produce`` writes into ``kept``, and seal it; None: it is not kept.

    Args:
        describe: see `SealedFile`.

    Raises:
        SaveAbandonedError: the process exits, and writes no longer.
        What ``produce`` raises of itself.
    """
    file = _Keeping(kept)
    try:
        with buffered(file) as gathering:
            produce(gathering)
    except (_GivenUpError, RuntimeError):
        if isinstance(file.error, SaveAbandonedError):  # torch hides it behind "unexpected pos"
            raise file.error from None
        if kept.whole_bytes is None:
            return None
        raise
    return kept.seal(file.digest(), describe)


class _GivenUpError(OSError):
    """The file is not kept: no more bytes are made for it."""


class _Keeping(Digesting):
    """Hands what is written to ``kept``."""

    def __init__(self, kept: KeptFile) -> None:
        super().__init__()
        self._kept = kept

    def _pass_on(self, block: memoryview) -> None:
        self._kept.write(block)
        if self._kept.whole_bytes is None:
            raise _GivenUpError
