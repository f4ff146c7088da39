"""Deltas between two versions of the same bytes: lossless, and refused when damaged.

A delta is a header and one record for every block that has changed. A record numbers the elements
that differ, and gives their new values. Elements are compared as bits: -0.0 is not 0.0, and a NaN
equals itself. At 1 % of bf16 elements changed at random a delta has 2.02 % of the bytes.

    record = header | changes in each page | numbers of changed elements in their page | new values

A page is 65536 elements, so that a number takes two bytes. That is the coding `Coding.PAGES`, for
fast links; `compact` has the other one. The loops over a block are compiled when the first one is
looked at, or before that if `compiling.prepare` is called.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import xxhash

from trainsync.weights.delta import compact
from trainsync.weights.delta.compiling import kernel
from trainsync.weights.errors import DeltaError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK_BYTES: Final = 1 << 20
"""A block, its base and what is made of them stay in a core's cache, or nearly."""

_HEADER: Final = struct.Struct("<4sIQQ")  # magic, records, bytes of the target, xxh3-64 of the rest
_RECORD: Final = struct.Struct("<QIII")  # start, bytes of the block, element size, values
_PAGE: Final = 1 << 16  # elements
_LINE_BYTES: Final = 64
_WIDTHS: Final = (8, 4, 2, 1)


class Coding(Enum):
    """How records are written; the value begins each delta, and every reader takes both."""

    PAGES = b"tsd2"
    COMPACT = b"tsd3"


@dataclass(frozen=True)
class Segment:
    """The changes in a stretch of the target: from the end of the segment before to ``stop``.

    Attributes:
        delta: of the whole target, with the records of this stretch alone; empty when it has none.
    """

    stop: int
    delta: Bytes


@dataclass(frozen=True)
class Block:
    """Bytes [start, stop) of the target: elements of ``width`` bytes (1, 2, 4 or 8)."""

    start: int
    stop: int
    width: int


def blocks(start: int, stop: int, itemsize: int) -> list[Block]:
    """Bytes [start, stop), elements of ``itemsize`` bytes, in blocks of at most `BLOCK_BYTES`.

    An element size that no machine word has (complex128, say) is compared in smaller words.
    """
    width = next(w for w in _WIDTHS if itemsize % w == 0)
    return [
        Block(first, min(first + BLOCK_BYTES, stop), width)
        for first in range(start, stop, BLOCK_BYTES)
    ]


def encode_block(
    base: Bytes, new: Bytes, block: Block, coding: Coding = Coding.PAGES
) -> Bytes | None:
    """The record of one block, whose bytes are ``base`` and ``new``; None when nothing changed.

    ``base`` is changed to ``new``.
    """
    loops = kernel()
    lines = base.size // _LINE_BYTES + 1
    masks, numbers = np.empty(lines, np.uint64), np.empty(lines, np.uint32)
    found, count = loops.find(base, new, block.width, masks, numbers)
    if count == 0:
        return None
    if coding is Coding.COMPACT:
        head = _RECORD.pack(block.start, base.size, block.width, count)
        codes = compact.encode(base, new, block.width, masks, numbers, found, count)
        return np.concatenate((np.frombuffer(head, np.uint8), codes))
    pages = _pages(base.size // block.width)
    first = _RECORD.size
    middle, end = first + 4 * pages, first + 4 * pages + 2 * count
    record = np.empty(end + block.width * count, np.uint8)
    _RECORD.pack_into(record.data, 0, block.start, base.size, block.width, count)
    changes, places = record[first:middle].view("<u4"), record[middle:end].view("<u2")
    changes[:] = 0
    loops.take(
        base,
        new,
        block.width,
        masks=masks,
        lines=numbers,
        found=found,
        changes=changes,
        places=places,
        values=record[end:],
    )
    return record


def join(records: Sequence[Bytes], total: int, coding: Coding = Coding.PAGES) -> Bytes:
    """The delta of a target of ``total`` bytes out of its records, which have this coding."""
    body = xxhash.xxh3_64()
    for record in records:
        body.update(record.data)
    head = _HEADER.pack(coding.value, len(records), total, body.intdigest())
    return np.concatenate((np.frombuffer(head, dtype=np.uint8), *records))


@dataclass(frozen=True)
class Record:
    """One record of a delta, checked: the ``block`` lies in the target, ``body`` has its length."""

    block: Block
    values: int
    body: Bytes
    coding: Coding = Coding.PAGES


def split(delta: Bytes, total: int) -> list[Record]:
    """The records of a delta for a target of ``total`` bytes: of blocks in order, none twice.

    Raises:
        DeltaError: it is damaged, or made for something else. Nothing was written anywhere.
    """
    if delta.size < _HEADER.size:
        raise DeltaError(f"a delta of {delta.size} bytes is shorter than its header")
    magic, count, of, checksum = _HEADER.unpack_from(delta.data)
    coding = next((one for one in Coding if one.value == magic), None)
    if coding is None or of != total:
        raise DeltaError(f"a delta for {of} bytes was expected to be one for {total} bytes")
    if xxhash.xxh3_64_intdigest(delta[_HEADER.size :].data) != checksum:
        raise DeltaError(f"a delta of {delta.size} bytes has another checksum than was sent")
    found: list[Record] = []
    position, free = _HEADER.size, 0
    for _ in range(count):
        if delta.size - position < _RECORD.size:
            raise DeltaError("a delta ends within a record")
        start, size, width, values = _RECORD.unpack_from(delta.data, position)
        if width not in _WIDTHS or size % width or start % width or start + size > total:
            raise DeltaError(f"a delta has a block of {size} bytes at {start} of {total}")
        if start < free:
            raise DeltaError(f"a delta's block at {start} begins within the one before it")
        position, free = position + _RECORD.size, start + size
        length = _body_bytes(delta[position:], coding, size // width, width, values)
        if length is None:
            raise DeltaError(f"a delta's record at {start} has parameters that no code has")
        if delta.size - position < length:
            raise DeltaError("a delta ends within a record")
        body = delta[position : position + length]
        found.append(Record(Block(start, start + size, width), values, body, coding))
        position += length
    if position != delta.size:
        raise DeltaError(f"a delta has {delta.size - position} bytes too many")
    return found


def apply_record(record: Record, target: Bytes) -> None:
    """Change the record's block of ``target``, which holds the base, to the new version.

    Raises:
        DeltaError: the record contradicts itself. ``target`` is as it was.
    """
    block = record.block
    memory = target[block.start : block.stop]
    if record.coding is Coding.COMPACT:
        if not compact.apply(record.body, record.values, block.width, memory):
            raise DeltaError(
                f"a delta's record at {block.start} has other codes than for {record.values} "
                "changes in its block"
            )
        return
    first = 4 * _pages(memory.size // block.width)
    middle = first + 2 * record.values
    changes = record.body[:first].copy().view("<u4")  # it may lie where no word does
    count = int(changes.sum(dtype=np.uint64))
    if count != record.values:
        raise DeltaError(
            f"a delta's record at {block.start} has {record.values} values for {count} changes"
        )
    places, values = record.body[first:middle], record.body[middle:]
    if not kernel().put(memory, block.width, changes, places, values):
        raise DeltaError(f"a delta's record at {block.start} changes what lies beyond its block")


def encode(
    base: Bytes,
    new: Bytes,
    parts: Iterable[Block],
    limit: int,
    coding: Coding = Coding.PAGES,
) -> Bytes | None:
    """The delta from ``base`` to ``new``, and ``base`` becomes ``new``.

    Args:
        base, new: of the same length.
        parts: blocks that hold every byte that may differ.
        limit: bytes of all records. None is returned when they need more.
    """
    records: list[Bytes] = []
    room = limit
    for block in parts:
        part = slice(block.start, block.stop)
        record = encode_block(base[part], new[part], block, coding)
        if record is not None and (room := room - record.size) >= 0:
            records.append(record)
    return None if room < 0 else join(records, new.size, coding)


def apply(delta: Bytes, target: Bytes) -> None:
    """Change ``target``, which holds the base, to the new version.

    Whether it was the right base is for a digest of the whole to say.

    Raises:
        DeltaError: the delta is damaged or made for something else; ``target`` is of no use then
            if a record contradicts itself, though its checksum agrees.
    """
    for record in split(delta, target.size):
        apply_record(record, target)


def _body_bytes(rest: Bytes, coding: Coding, elements: int, width: int, values: int) -> int | None:
    """Bytes of a record after its header, which begins ``rest``; None: it cannot be one."""
    if coding is Coding.PAGES:
        return 4 * _pages(elements) + (2 + width) * values
    size = compact.PARAMETERS.size
    if rest.size < size:
        return size
    codes = compact.length(rest[:size].data, width, values)
    return None if codes is None else size + codes


def _pages(elements: int) -> int:
    """How many pages a block of so many elements has."""
    return -(-elements // _PAGE)
