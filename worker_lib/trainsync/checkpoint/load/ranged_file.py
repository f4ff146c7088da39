"""A file of a checkpoint in a store as torch reads one: from any place on, and never written."""

import io
from typing import TYPE_CHECKING, Final

from trainsync.checkpoint.load.ranges import FileRange, Ranges

if TYPE_CHECKING:
    from typing_extensions import Buffer

_REGIONS: Final = 3  # an archive is read at its end, at its begin, and then on from there
_INDEX: Final = 8 << 10  # bytes at the end, with what says where the index is


class RangedFile(io.RawIOBase):
    """Three regions of the file that were read last are in memory, and no more.

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
        if not self._regions:
            self._hold((max(self._size - _INDEX, 0), self._size), (0, 1))
        for start, region in self._regions:
            if start <= self._at and end <= start + len(region):
                view[:] = region[self._at - start : end - start]
                return
        if len(view) >= self._ahead:
            self._ranges.read([FileRange(self._path, self._at, view)])
            return
        self._hold((self._at, end))
        start, region = self._regions[-1]
        view[:] = region[self._at - start : end - start]

    def _hold(self, *spans: tuple[int, int]) -> None:
        """Have regions around these spans in memory, from the begin of a block on, read at once."""
        block = self._ranges.block(self._path)
        regions = []
        for begin, end in spans:
            start = begin // block * block
            stop = min(max(start + self._ahead, end), self._size)
            regions.append((start, memoryview(bytearray(stop - start))))
        self._regions = self._regions[len(spans) - _REGIONS :]
        self._ranges.read(FileRange(self._path, start, region) for start, region in regions)
        self._regions += regions
