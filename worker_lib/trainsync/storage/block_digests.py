"""Digests of a file's blocks: by them a part of the file is checked without the rest of it.

They are a file of the save themselves, beside the one that they are of.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainsync.storage import digest

SUFFIX: Final = ".xxh3-blocks"
BLOCK: Final = 256 << 10  # bytes of a block
_HEAD: Final = struct.Struct("<8sQ")  # what the file is, and the bytes of a block
_MAGIC: Final = b"TSBLOCK1"
_DIGEST: Final = 16  # bytes of an xxh3-128


def beside(path: str) -> str:
    """The path of the digests of the blocks of the file ``path``."""
    return path + SUFFIX


@dataclass(frozen=True)
class BlockDigests:
    """The digests of a file's blocks, from its first byte on.

    ``block``: bytes of each; the last one has what is left. ``digests``: the xxh3-128 of each
    block, 16 bytes with the most significant first, one block's after the other's.
    """

    block: int
    digests: bytes

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.digests) // _DIGEST

    def alike(self, other: "BlockDigests") -> int:
        """How many blocks are the same in both, at the same place."""
        return sum(one == two for one, two in zip(self._each(), other._each(), strict=False))

    def _each(self) -> Iterator[bytes]:
        for start in range(0, len(self.digests), _DIGEST):
            yield self.digests[start : start + _DIGEST]

    def encode(self) -> bytes:
        """The bytes of the file that has them."""
        return _HEAD.pack(_MAGIC, self.block) + self.digests

    def match(self, number: int, block: memoryview) -> bool:
        """Whether ``block`` has the bytes of the block of that number."""
        hasher = digest.new_hasher()
        hasher.update(block)
        return hasher.digest() == self.digests[number * _DIGEST : (number + 1) * _DIGEST]


def decode(data: bytes, size: int) -> BlockDigests | None:
    """The digests in ``data``, of a file of ``size`` bytes; None where it holds none of such a
    file, as where another release wrote it."""
    if len(data) < _HEAD.size:
        return None
    magic, block = _HEAD.unpack_from(data)
    digests = data[_HEAD.size :]
    if magic != _MAGIC or not block or len(digests) != -(-size // block) * _DIGEST:
        return None
    return BlockDigests(block, digests)


def of_one_block(file_digest: str) -> BlockDigests:
    """Those of a file of one block, whose own digest is that of the block."""
    return BlockDigests(BLOCK, bytes.fromhex(file_digest.partition(":")[2]))


class BlockHasher:
    """Takes a file's bytes in order, and the digest of each block.

    Args:
        block: bytes of one.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._hasher = digest.new_hasher()
        self._done: list[bytes] = []
        self._held = 0  # bytes of the block at hand
        self._compared = 0  # blocks

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        for part in self._cut(data):
            self._hasher.update(part)
            self._held += len(part)
            if self._held == self._block:
                self._end_block()

    def finish(self) -> BlockDigests | None:
        """The blocks' digests; None of a file of one block, whose own digest says as much."""
        if self._held:
            self._end_block()
        return BlockDigests(self._block, b"".join(self._done)) if len(self._done) > 1 else None

    def differing(self, other: BlockDigests) -> list[int]:
        """The numbers of the blocks that have ended since the last call and are others than in
        ``other``, whose blocks have as many bytes."""
        start, self._compared = self._compared, len(self._done)
        return [
            number
            for number, mine in enumerate(self._done[start:], start)
            if mine != other.digests[number * _DIGEST : (number + 1) * _DIGEST]
        ]

    def _cut(self, data: memoryview) -> Iterator[memoryview]:
        while data:
            room = self._block - self._held
            yield data[:room]
            data = data[room:]

    def _end_block(self) -> None:
        self._done.append(self._hasher.digest())
        self._hasher = digest.new_hasher()
        self._held = 0
