"""Digests of a file's blocks: by them a part of the file is checked without the rest of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from trainsync.storage import digest

LEAST: Final = 1 << 20  # bytes of a block
_LARGEST: Final = 64 << 20  # bytes of a block; larger ones are not noted
_MOST: Final = 16384  # full blocks of a save; with each file's last one at most twice as many
_DIGITS: Final = 32


@dataclass(frozen=True)
class BlockDigests:
    """The digests of a file's blocks, from its first byte on.

    ``bytes``: of each block; the last one has what is left. ``digests``: hex digits of each block's
    xxh3-128, one block's after the other's.
    """

    bytes: Annotated[int, Field(ge=1)]
    digests: Annotated[str, Field(pattern=r"^([0-9a-f]{32})+$")]

    def __len__(self) -> int:
        return len(self.digests) // _DIGITS

    def of(self, number: int) -> str:
        """The hex digits of a block's digest."""
        return self.digests[number * _DIGITS : (number + 1) * _DIGITS]

    def fit(self, size: int) -> bool:
        """Whether they are those of a file of ``size`` bytes."""
        return len(self) == -(-size // self.bytes)

    def match(self, number: int, block: memoryview) -> bool:
        """Whether ``block`` has the bytes of the block of that number."""
        hasher = digest.new_hasher()
        hasher.update(block)
        return hasher.hexdigest() == self.of(number)


class BlockHasher:
    """Takes a file's bytes in order, and the digest of each block.

    Args:
        size: of all files of the save together, about: by it the size of the blocks is chosen, so
            that the manifest, which holds 32 characters of each block, stays small.
    """

    def __init__(self, size: int) -> None:
        self._block = LEAST
        while self._block * _MOST < size:
            self._block *= 2
        self._hasher = digest.new_hasher()
        self._done: list[str] = []
        self._held = 0  # bytes of the block at hand

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        for part in self._cut(data):
            self._hasher.update(part)
            self._held += len(part)
            if self._held == self._block:
                self._end_block()

    def through(self, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """``blocks``, each of which is taken as it goes by."""
        for block in blocks:
            self.update(memoryview(block))
            yield block

    def finish(self) -> BlockDigests | None:
        """The blocks' digests.

        None of a file of one block, whose own digest says as much, and where the save is so large
        that its blocks would be larger than 64 MiB: then the file is read whole.
        """
        if self._held:
            self._end_block()
        if len(self._done) < 2 or self._block > _LARGEST:
            return None
        return BlockDigests(self._block, "".join(self._done))

    def _cut(self, data: memoryview) -> Iterator[memoryview]:
        while data:
            room = self._block - self._held
            yield data[:room]
            data = data[room:]

    def _end_block(self) -> None:
        self._done.append(self._hasher.hexdigest())
        self._hasher = digest.new_hasher()
        self._held = 0
