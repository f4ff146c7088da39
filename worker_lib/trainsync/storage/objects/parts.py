"""The bytes of a file in a store, also of one of which an older object has a part."""

from collections.abc import Iterator
from typing import Final

from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.requests import transfer
from trainsync.storage.saves.based import Base, Blocks

_NONE: Final = (0, 0)


def sizes(key: str, size: int, base: Base | None) -> dict[str, int]:
    """The bytes of each object that a file of ``size`` bytes is in."""
    return {key: size} if base is None else {key: base.own_bytes(size), base.key: size}


def read_range(
    bucket: ObjectBucket, key: str, size: int, base: Base | None, start: int, end: int
) -> memoryview:
    """The bytes of a file from ``start`` on, before ``end``.

    Args:
        key: of the file's own object.
        base: where the rest is; None: there is none.

    Raises:
        ObjectMissingError, ObjectChangedError: an object is gone, or has another size.
    """
    if base is None:
        return bucket.range(key, size, start, end)
    blocks = base.blocks(size)
    runs = list(blocks.runs(start, end))
    own, older = _around(runs, True), _around(runs, False)
    first = blocks.place(own[0])
    data = _read(bucket, key, blocks.own_bytes, first, blocks.place(own[1]))
    rest = _read(bucket, base.key, size, *older)
    if not own[1] or not older[1]:
        return data or rest
    whole = memoryview(bytearray(end - start))
    for is_own, begin, stop in runs:
        at = blocks.place(begin) - first if is_own else begin - older[0]
        whole[begin - start : stop - start] = (data if is_own else rest)[at : at + stop - begin]
    return whole


def read_blocks(bucket: ObjectBucket, key: str, size: int, base: Base | None) -> Iterator[bytes]:
    """All bytes of a file, in order; see `read_range`."""
    if base is None:
        return bucket.blocks(key, size)

    def fetch(start: int, end: int) -> bytes:
        return bytes(read_range(bucket, key, size, base, start, end))

    return transfer.in_order(size, bucket.limits.part_bytes, bucket.limits.parts, fetch)


def own_part(data: memoryview, start: int, blocks: Blocks) -> Iterator[memoryview]:
    """Parts of ``data``, the file's bytes from ``start`` on, that are in its own object."""
    for own, begin, stop in blocks.runs(start, start + len(data)):
        if own:
            yield data[begin - start : stop - start]


def _around(runs: list[tuple[bool, int, int]], own: bool) -> tuple[int, int]:
    """From the first of these runs to the last."""
    found = [(start, end) for is_own, start, end in runs if is_own is own]
    return (found[0][0], found[-1][1]) if found else _NONE


def _read(bucket: ObjectBucket, key: str, size: int, start: int, end: int) -> memoryview:
    return bucket.range(key, size, start, end) if start < end else memoryview(b"")
