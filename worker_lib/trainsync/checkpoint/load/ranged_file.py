"""A file of a checkpoint in a store as torch reads one: from any place on, and never written."""

import io
from typing import TYPE_CHECKING, Final

from trainsync.checkpoint.load.ranges import Part, Ranges

if TYPE_CHECKING:
    from typing_extensions import Buffer

_REGIONS: Final = 2  # an archive is read at its end, and from its begin on


class RangedFile(io.RawIOBase):
    """Two regions of the file that were read last are in memory, and no more.

    Args:
        ahead: bytes that are read at once where a read asks for fewer.
    """

    def __init__(self, ranges: Ranges, path: str, ahead: int) -> None:
        self._ranges = ranges
        self._path = path
        self._ahead = ahead
        self._size = ranges.size(path)
        self._at = 0
        self._regions: list[tuple[int, memoryview]] = []  # where it begins; the oldest first
        self.error: Exception | None = None
        """The error of a read; torch hides it behind an error of its own."""

    def readable(self) -> bool:
        """True: torch asks."""
        return True

    def seekable(self) -> bool:
        """True: torch asks."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Let the next read begin there."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: "Buffer", /) -> int:
        """Fill ``buffer`` as far as the file goes; 0 where reading failed, see `error`."""
        view = memoryview(buffer).cast("B")
        view = view[: max(self._size - self._at, 0)]
        if self.error is not None:
            return 0  # torch reads on; one that differs is told of once
        try:
            self._fill(view)
        except Exception as error:  # noqa: BLE001 - must not go through torch's C++
            self.error = error
            return 0
        self._at += len(view)
        return len(view)

    def _fill(self, view: memoryview) -> None:
        end = self._at + len(view)
        for start, region in self._regions:
            if start <= self._at and end <= start + len(region):
                view[:] = region[self._at - start : end - start]
                return
        if len(view) >= self._ahead:
            self._ranges.read([Part(self._path, self._at, view)])
            return
        block = self._ranges.block(self._path)
        start = self._at // block * block
        region = memoryview(bytearray(min(max(start + self._ahead, end), self._size) - start))
        self._regions = self._regions[1 - _REGIONS :]
        self._ranges.read([Part(self._path, start, region)])
        self._regions.append((start, region))
        view[:] = region[self._at - start : end - start]
