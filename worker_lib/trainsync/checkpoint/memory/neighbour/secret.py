"""The run's key, by which its processes know one another: a file of the volume or the store.

A process that can read the volume may read the checkpoints themselves, so the key gives no right
that its reader lacks.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory

KEY_BYTES: Final = 32
_MODE: Final = 0o660  # the run's pods share its group


def run_key(run: RunDirectory) -> bytes:
    """The key; made by the process that first asks for one.

    Raises:
        OSError: the volume; or the key is not one.
    """
    path = run.memory_key
    with suppress(FileNotFoundError):
        return _read(path)
    atomic.make_directory(path.parent)
    temporary = atomic.temporary_name(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, _MODE), "wb") as file:
            os.fchmod(file.fileno(), _MODE)
            file.write(secrets.token_hex(KEY_BYTES).encode())
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was first
            atomic.hard_link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        found = os.read(fd, 4 * KEY_BYTES)
    finally:
        os.close(fd)
    if len(found) != 2 * KEY_BYTES:
        raise OSError(f"{path} holds {len(found)} bytes; expected a key of {2 * KEY_BYTES}")
    return found
