"""A file of a save in a store of which an older file's object has a part: the blocks that have not
changed since.

The other blocks, in order, are the file's own object. Both files have as many bytes, and a block
lies at one place in both: so any bytes of the file are in two ranges of objects at most, one of
each. The older object is that of a whole file, never of a part: files form no chains.
"""

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field

from trainsync.storage import records


@dataclass(frozen=True)
class Blocks:
    """Which blocks of a file of ``size`` bytes lie in its own object.

    ``block``: bytes of each; the last one has what is left. ``own``: bit N is set where block N
    does.
    """

    size: int
    block: int
    own: int

    @classmethod
    def of(cls, size: int, block: int, numbers: Iterable[int]) -> Self:
        """Those of which the blocks ``numbers`` are the own ones."""
        bits = bytearray(_bytes_of_bits(_count(size, block)))
        for number in numbers:
            bits[number // 8] |= 1 << number % 8
        return cls(size, block, int.from_bytes(bits, "little"))

    @property
    def own_bytes(self) -> int:
        """Bytes of the own object."""
        return self.place(self.size)

    def is_own(self, number: int) -> bool:
        """Whether the block of that number lies in the own object."""
        return bool(self.own >> number & 1)

    def place(self, at: int) -> int:
        """Where the own object has the file's byte ``at``; of one that it lacks, and of the file's
        end, where it has the next."""
        number, rest = divmod(at, self.block)
        before = (self.own & ((1 << number) - 1)).bit_count() * self.block
        return before + (rest if self.is_own(number) else 0)

    def runs(self, start: int, end: int) -> Iterator[tuple[bool, int, int]]:
        """The bytes from ``start`` on, before ``end``, by where they lie: whether that is the own
        object, and begin and end in the file."""
        while start < end:
            number = start // self.block
            own = self.is_own(number)
            while (number + 1) * self.block < end and self.is_own(number + 1) is own:
                number += 1
            stop = min((number + 1) * self.block, end)
            yield own, start, stop
            start = stop


@dataclass(frozen=True, kw_only=True)
class Base:
    """Where the rest of a file is, of which the own object has some blocks.

    ``key``: the older object. ``block``: bytes of a block. ``own``: a bit for each block of the
    file, the lowest bit of a byte first, in base64: set where the own object has the block.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    key: Annotated[str, Field(min_length=1, max_length=1024)]
    block: Annotated[int, Field(ge=1 << 12, le=1 << 30)]
    own: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]

    @classmethod
    def of(cls, key: str, blocks: Blocks) -> Self:
        """The rest of a file whose own ``blocks`` are these is in ``key``."""
        bits = blocks.own.to_bytes(_bytes_of_bits(_count(blocks.size, blocks.block)), "little")
        return cls(key=key, block=blocks.block, own=base64.b64encode(bits).decode())

    def blocks(self, size: int) -> Blocks:
        """Those of a file of ``size`` bytes.

        Raises:
            ValueError: it speaks of a file of another size, or of one of which either object has
                nothing.
        """
        bits = base64.b64decode(self.own, validate=True)
        count, own = _count(size, self.block), int.from_bytes(bits, "little")
        if len(bits) != _bytes_of_bits(count) or not 0 < own < (1 << count) - 1:
            raise ValueError(f"names other blocks than those of {size} bytes")
        return Blocks(size, self.block, own)

    def own_bytes(self, size: int) -> int:
        """Bytes of the own object of a file of ``size`` bytes."""
        return self.blocks(size).own_bytes


def _count(size: int, block: int) -> int:
    return -(-size // block)


def _bytes_of_bits(count: int) -> int:
    return -(-count // 8)
