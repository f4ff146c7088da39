"""The memory of a file that no load needs any more is given to the next file of its part.

Memory that was not used before costs more than the bytes that go into it: the system has to find,
clear and count each page of 4 KiB, and later to give it back.

No file changes under a reader, whether it still reads or has mapped the file:

- A file loses the name that says its digest before a byte of it is changed. So a process that is
  killed at any instant leaves no bytes under the digest of others.
- It is changed only when no process has it open or mapped. The system says so, by granting a write
  lease, and counts readers that know nothing of this: tensors that are mapped (through a descriptor
  of their own), a file on its way to a socket. A lock that readers take would end with the
  descriptor on which it was taken, before the mapping does.
- A reader looks at the name once more after it has opened the file: then it was open before the
  name went, and so before the lease was asked for.

Where a file is still in use, or the system cannot tell, a new file is made. Bytes that are on their
way to a socket after their sender has closed the file may change; the receiver compares digests.
"""

import fcntl
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

from trainsync.failpoints import failpoint

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class InUseError(Exception):
    """A process has the file open or mapped."""


def can_tell(directory: Path) -> bool:
    """Whether the system can tell, of files in a directory, that no process uses them.

    It is tried with a file that is mapped, and closed: an overlay file system does not see that.
    The file has no name, so nothing is left of it.
    """
    import torch  # here, since those that only read files import this module, too

    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 1)
            _check_unused(fd)
            # Not by `mmap.mmap`, which keeps a descriptor of the file.
            view = torch.from_file(f"/proc/self/fd/{fd}", size=1, dtype=torch.uint8)
            with suppress(InUseError):
                _check_unused(fd)
                return False
            del view  # it was mapped so far
        finally:
            os.close(fd)
    # RuntimeError: it cannot be mapped; AttributeError: it is not Linux.
    except (AttributeError, InUseError, OSError, RuntimeError):
        return False
    return True


def open_whole(path: Path) -> int:
    """Open a whole file to read; its bytes stay while it is open or mapped.

    Raises:
        FileNotFoundError: it was dropped, maybe just now.
        OSError: it cannot be opened; a symbolic link is not followed.
    """
    fd = os.open(path, _READ)
    try:
        if not os.path.samestat(os.fstat(fd), path.lstat()):
            raise FileNotFoundError(f"{path} is another file by now")
    except BaseException:
        os.close(fd)
        raise
    return fd


def take(spare: Path, path: Path) -> int:
    """Rename ``spare`` to ``path`` and open it, to write other bytes into its memory.

    Returns:
        A descriptor of the file, which is as long as before. On an error there is neither file.

    Raises:
        InUseError: its bytes must not change.
        FileNotFoundError: another process has taken or dropped it.
        OSError: the system cannot tell whether it is in use.
    """
    spare.rename(path)
    try:
        failpoint("memory.taken")
        fd = os.open(path, _WRITE)
        try:
            _check_unused(fd)
        except BaseException:
            os.close(fd)
            raise
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return fd


def _check_unused(fd: int) -> None:
    # The process is told by a signal of one that opens the file amid these calls. The one that the
    # system would send else ends a process; this one is ignored by those that do not ask for it.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        raise InUseError("a process has it open") from None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
