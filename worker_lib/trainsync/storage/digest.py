"""Digests: xxh3-128 of shard bytes (fast, finds damage), sha256 of manifests (names them)."""

import hashlib
from pathlib import Path
from typing import Final, Protocol

import xxhash

ALGORITHM: Final = "xxh3-128"
PATTERN: Final = r"^xxh3-128:[0-9a-f]{32}$"
_BLOCK: Final = 8 << 20  # large enough that the file system reads ahead


class Hasher(Protocol):
    """What `new_hasher` gives: feed it bytes in order."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take the next bytes."""
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


def file_digest(path: Path) -> str:
    """Digest of the bytes now in ``path``, read in blocks of 8 MiB."""
    hasher = new_hasher()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(view[:count])
    return format_digest(hasher)


def manifest_digest(data: bytes) -> str:
    """``sha256:<hex>`` of a manifest file's bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
