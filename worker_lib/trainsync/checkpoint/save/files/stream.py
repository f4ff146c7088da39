"""A file for writers that go from front to back: digests, and keeps the disk busy.

Where the time goes (1 GB of staged tensors): the digest 0.04 s, the copy into the page cache
0.4 s, both at memory speed; and the disk, which by itself would only start working at the fsync. So
the system is asked every few megabytes to begin. All of this releases the GIL, and one call handles
megabytes: a writer process would win nothing, and cost shared memory.
"""

import ctypes
import errno
import io
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from trainsync.checkpoint.errors import SaveAbandonedError
from trainsync.checkpoint.save import ending
from trainsync.storage import digest

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BLOCK = 4 << 20  # small enough to be still in the cache when it is written after being digested
_GATHERED = 256 << 10  # torch writes many small records between the large ones
WRITEBACK_BYTES = 32 << 20

_UNDER_WAY = 3  # pieces of so many bytes that the disk may be behind before they are forgotten

_SYNC_FILE_RANGE_WRITE = 2  # begin to write dirty pages, wait for nothing
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 1 | 2 | 4
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:  # Linux
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Writeback:
    """Lets the system begin, every few megabytes, to bring a file that is written to the disk.

    Args:
        fd: of the file, which is written from front to back.
        forget: what is on the disk does not stay in the system's memory: for a file larger than
            others would give theirs for. Its pages are used again for what comes next, which costs
            a fraction of pages that were never used (0.2 against 0.8 s a GB and more).
        every: bytes after which the system is asked again.
    """

    def __init__(self, fd: int, *, forget: bool = False, every: int = WRITEBACK_BYTES) -> None:
        self._fd = fd
        self._forget = forget
        self._every = every
        self._begun = 0  # bytes that the system was asked for
        self._under_way: deque[tuple[int, int]] = deque()  # start and size

    def written(self, size: int) -> None:
        """The file's first ``size`` bytes are written. Raises `OSError` when the disk failed."""
        start = self._begun
        if size - start < self._every:
            return
        self._begun = size
        self._ask(start, size - start, _SYNC_FILE_RANGE_WRITE)
        if not self._forget:
            return
        self._under_way.append((start, size - start))
        if len(self._under_way) > _UNDER_WAY:
            oldest = self._under_way.popleft()
            self._ask(*oldest, _SYNC_FILE_RANGE_WRITE_AND_WAIT)
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(self._fd, *oldest, os.POSIX_FADV_DONTNEED)

    def _ask(self, start: int, size: int, what: int) -> None:
        if _sync_file_range is None or _sync_file_range(self._fd, start, size, what) == 0:
            return
        code = ctypes.get_errno()
        if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))
        # Else this file system does not know the call. It is only a hint.


class Digesting(io.RawIOBase):
    """Counts and digests what is written, and passes it on in blocks. For `buffered`.

    Closing it ends that more is taken, and nothing else.
    """

    def __init__(self) -> None:
        self._hasher = digest.new_hasher()
        self.size = 0
        """Bytes passed on so far."""
        self.error: Exception | None = None
        """The error of a write; torch hides it behind an error of its own."""

    @abstractmethod
    def _pass_on(self, block: memoryview) -> None:
        """Take the next bytes, at most `_BLOCK`, before it returns: their memory is used again."""

    def writable(self) -> bool:
        """True: torch asks."""
        return True

    def write(self, data: "Buffer", /) -> int:
        """Take all of ``data``; may be reused on return.

        Raises:
            SaveAbandonedError: the process exits, and writes no longer.
            What `_pass_on` raises.
        """
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _BLOCK):
                if ending.over.is_set():
                    raise SaveAbandonedError("the process exited before the part was written")
                block = view[start : start + _BLOCK]
                self._hasher.update(block)
                self._pass_on(block)
                self.size += len(block)
        except Exception as error:
            self.error = error
            raise
        return len(view)

    def digest(self) -> str:
        """Digest of all bytes that were written."""
        return digest.format_digest(self._hasher)


class DigestingFile(Digesting):
    """Writes to ``fd``, which stays open. Nothing is durable before an fsync.

    Args:
        every: see `Writeback`.
    """

    def __init__(self, fd: int, *, every: int = WRITEBACK_BYTES) -> None:
        super().__init__()
        self._fd = fd
        self._writeback = Writeback(fd, every=every)

    def _pass_on(self, block: memoryview) -> None:
        end = self.size + len(block)
        while block:  # the system may take a part, as when the disk is nearly full
            block = block[os.write(self._fd, block) :]
        self._writeback.written(end)


@contextmanager
def buffered(file: io.RawIOBase) -> Iterator[BinaryIO]:
    """Gathers what the body writes in small pieces; on its end ``file`` has everything.

    For ``torch.save``: it writes its archive without seeking, so the digest is that of the file, in
    five small pieces for each tensor, which would take longer in Python than the bytes.

    Raises:
        OSError: a write failed.
    """
    try:
        gathering = io.BufferedWriter(file, _GATHERED)
        yield gathering
        gathering.flush()
    finally:
        file.close()  # after an error, too, what is gathered must not go to a descriptor of others
