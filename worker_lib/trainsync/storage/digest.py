"""Digests: xxh3-128 of shard bytes (fast, finds damage), sha256 of manifests (names them)."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import xxhash

ALGORITHM: Final = "xxh3-128"
PATTERN: Final = r"^xxh3-128:[0-9a-f]{32}$"
# Small enough that the hash finds the block in the core's own cache, large enough that a call per
# block costs nothing.
_BLOCK: Final = 512 << 10


class Hasher(Protocol):
    """A hasher that `new_hasher` makes: feed it bytes in order."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take the next bytes."""
        ...

    def digest(self) -> bytes:
        """16 bytes of what was fed so far, the most significant first."""
        ...

    def hexdigest(self) -> str:
        """32 hex digits of what was fed so far."""
        ...


def new_hasher() -> Hasher:
    """An empty xxh3-128, for writers that digest on the way."""
    hasher: Hasher = xxhash.xxh3_128()
    return hasher


def format_digest(hasher: Hasher) -> str:
    """``xxh3-128:<hex>``, the form in receipts and manifests."""
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def file_digest(path: Path, on_block: Callable[[int], None] = lambda _: None) -> str:
    """Digest of the bytes now in ``path``; a symbolic link is not followed.

    Args:
        on_block: told the bytes of each block that was read; what it raises stops the reading.

    Raises:
        OSError: it cannot be read.
    """
    hasher = new_hasher()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads further ahead
        while count := file.readinto(buffer):
            hasher.update(view[:count])
            on_block(count)
    return format_digest(hasher)


def drop_cached(path: Path) -> None:
    """Let the next reading of ``path`` come from the disk, where the system can do that.

    Raises:
        OSError: it cannot be opened; a symbolic link is not followed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def manifest_digest(data: bytes) -> str:
    """``sha256:<hex>`` of a manifest file's bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
