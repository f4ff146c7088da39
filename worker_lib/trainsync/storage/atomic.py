"""Durable, all-or-nothing writes, with modes that let the monitor and the GPU pods share a volume.

A file is written under a temporary name, fsynced, renamed, and its directory is fsynced: after a
crash there is the old file or the new one, never a torn one. Directories are 2775 and files 664
with any umask, since monitor and pods run as different users of one group.
"""

import errno
import json
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trainsync.storage.errors import UnsafePathError

DIRECTORY_MODE: Final = 0o2775
FILE_MODE: Final = 0o664
_TEMPORARY_SUFFIX: Final = ".tmp"
_TEMPORARY: Final = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")
# What link(2) says where the file system, or the way it is mounted, has no hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV})
_MAKING: Final = threading.Lock()  # of directories, under an umask


def fsync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_there(path: Path) -> bool:
    """Whether something, be it a broken link, has that name.

    Raises:
        OSError: that cannot be known; `os.path.lexists` says no to what it may not see.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_directory(path: Path, *, durably: bool = True) -> None:
    """Make ``path`` and its missing parents, each 2775.

    Args:
        durably: whether the directories that they are in are fsynced; without, a crash of the
            machine may take those that this call made.

    Raises:
        UnsafePathError: something that is not a directory (a symbolic link, too) is in the way.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        # Writers of one save come at the same time: the first one makes it durable for all.
        with _MAKING:
            _make_missing(path, durably)
        mode = os.lstat(path).st_mode
    else:
        if durably:  # the thread that made the directory may not have fsynced its parent yet
            with _MAKING:
                pass
    if not stat.S_ISDIR(mode):
        raise UnsafePathError(f"{path} is not a directory (symbolic links are refused)")


def _make_missing(path: Path, durably: bool) -> None:
    missing = []
    current = path
    while not is_there(current):
        missing.append(current)
        current = current.parent
    for directory in reversed(missing):
        _make_one(directory)
        if durably:
            fsync_directory(directory.parent)


def _make_one(directory: Path) -> None:
    # In place: renaming a finished directory into place would replace an empty one that another
    # participant has just made, under its hands. So its mode must be right at once, or another
    # user of the group that comes before chmod would be refused; hence the umask, which threads of
    # this process share.
    try:
        before = os.umask(0o002)
        try:
            directory.mkdir(0o775)
        finally:
            os.umask(before)
        directory.chmod(DIRECTORY_MODE)  # setgid, where the parent did not hand it down
    except FileExistsError:
        pass  # another participant made it in between


def temporary_name(path: Path) -> Path:
    """A fresh hidden name beside ``path``; scans pass over it, cleaning removes it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")


def is_temporary(name: str) -> bool:
    """Whether ``name`` came from `temporary_name`."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def temporary_of(name: str) -> str | None:
    """The name that the temporary file ``name`` was to get; None when it is no temporary."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else None


def write_bytes(
    path: Path,
    data: bytes,
    before_replace: Callable[[], None] = lambda: None,
    *,
    durably: bool = True,
) -> None:
    """Replace ``path`` by ``data``, durably and at once. Raises `OSError`; then nothing changed.

    Args:
        before_replace: called when all but the rename is done; what it raises stops the write.
        durably: whether the directory is fsynced, too; without, a crash of the machine may bring
            back what was there before, but never a torn file.
    """
    temporary = _write_temporary(path, data)
    try:
        before_replace()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durably:
        fsync_directory(path.parent)


def write_exclusive(path: Path, data: bytes) -> None:
    """Make ``path`` with ``data``, durably and at once.

    Raises:
        FileExistsError: it is there already; it stays untouched.
        OSError: as `hard_link` does, too.
    """
    temporary = _write_temporary(path, data)
    try:
        # O_EXCL alone could be seen half written.
        hard_link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def hard_link(source: Path, target: Path) -> None:
    """Give the file ``source`` the name ``target``, too; unlike rename(2) it replaces nothing.

    Raises:
        FileExistsError: the name is taken.
        OSError: among others that the file system has no hard links, in a sentence.
    """
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        why = f"the volume makes no hard links ({error.strerror}); expected a file system that does"
        raise OSError(error.errno, why, str(target)) from error


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """`write_bytes` of ``value`` as readable JSON."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = temporary_name(path)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, FILE_MODE)
            file.write(data)
            file.flush()
            os.fsync(fd)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
