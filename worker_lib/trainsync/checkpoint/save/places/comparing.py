"""A file that takes what would be written, and compares it with a file that there is."""

import io
from abc import abstractmethod
from typing import TYPE_CHECKING, Final

from trainsync.checkpoint.save import ending

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK: Final = 4 << 20
"""Bytes that are compared at once."""


class Comparing(io.RawIOBase):
    """Compares up to the first block that differs, or until the process ends."""

    def __init__(self) -> None:
        self._size = 0
        self._differs = False

    @abstractmethod
    def _is_same(self, block: memoryview) -> bool:
        """Whether the file has the ``block``, of at most `BLOCK` bytes, after `_size` bytes, as far
        as that is known by now."""

    def writable(self) -> bool:
        return True

    def write(self, data: "Buffer", /) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            # Not an error at the first difference: torch would write on, and hide it.
            if self._differs or ending.over.is_set() or not self._is_same(block):
                self._differs = True
                break
            self._size += len(block)
        return len(view)
