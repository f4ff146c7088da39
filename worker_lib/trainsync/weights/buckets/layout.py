"""Which bytes of a model travel in which bucket: the same on both sides, from the schema alone.

The *stream* is every tensor's bytes, row-major, in the order of the schema, each tensor at a
multiple of `ALIGNMENT`. A bucket is a range of the stream. A receiver that keeps the stream as one
array receives a bucket where it belongs, and views its tensors in place.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Final

import xxhash

from trainsync.weights.buckets.schema import ALIGNMENT
from trainsync.weights.errors import InconsistentUploadError

DIRECT_BYTES: Final = 1 << 20
"""A tensor of at least this size has its buckets for itself, so that it can be sent without being
copied; smaller ones are packed together, since a collective costs as much as copying them."""

PIECE_BYTES: Final = 512 << 10
"""Read, passed on and digested at once: small enough for a core's own cache, large enough that the
calls cost nothing next to it. 256 KiB and 1 MiB were slower."""

_MOST_DIFFERENCES: Final = 5


@dataclass(frozen=True)
class TensorMeta:
    """One full tensor. ``dtype`` is as torch prints it without "torch."."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes, without padding."""
        return prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class StreamSchema:
    """The tensors of a stream, in order."""

    tensors: tuple[TensorMeta, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts in the stream, in bytes."""
        starts, position = [], 0
        for tensor in self.tensors:
            starts.append(position)
            position += -(-tensor.size // ALIGNMENT) * ALIGNMENT
        return tuple(starts)

    @property
    def total(self) -> int:
        """Bytes of the stream, with padding."""
        if not self.tensors:
            return 0
        return self.offsets[-1] + self.tensors[-1].size

    @cached_property
    def digest(self) -> str:
        """Equal for equal schemas."""
        return f"xxh3-128:{xxhash.xxh3_128_hexdigest(self.encode())}"

    def encode(self) -> bytes:
        """Compact JSON."""
        rows = [[t.name, t.dtype, t.itemsize, t.shape] for t in self.tensors]
        return json.dumps(rows, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> "StreamSchema":
        """The inverse of `encode`.

        Raises:
            InconsistentUploadError: the bytes are not a schema.
        """
        try:
            rows = [
                TensorMeta(name, dtype, itemsize, tuple(shape))
                for name, dtype, itemsize, shape in json.loads(data)
            ]
        except (ValueError, TypeError) as error:
            raise InconsistentUploadError(f"a schema cannot be read: {error}") from error
        for row in rows:
            numbers = (row.itemsize, *row.shape)
            if not all(isinstance(n, int) and n >= 0 for n in numbers) or not all(
                isinstance(text, str) for text in (row.name, row.dtype)
            ):
                raise InconsistentUploadError(f"a schema cannot be read: {row!r}")
        return StreamSchema(tuple(rows))


@dataclass(frozen=True)
class Slice:
    """Bytes [start, stop) of a tensor, at ``offset`` in a bucket."""

    tensor: int  # its number in the schema
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Bytes [start, stop) of the stream. What no slice covers is padding, and is zero."""

    start: int
    stop: int
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


def plan_buckets(schema: StreamSchema, bucket_size: int) -> list[Bucket]:
    """Buckets of at most ``bucket_size`` bytes that hold every byte of every tensor once, in order.

    Raises:
        ValueError: the size is not a positive multiple of `ALIGNMENT`.
    """
    if bucket_size <= 0 or bucket_size % ALIGNMENT:
        raise ValueError(
            f"bucket size must be a positive multiple of {ALIGNMENT} bytes, got {bucket_size}"
        )
    buckets: list[Bucket] = []
    open_slices: list[Slice] = []
    open_start = 0

    def close() -> None:
        if open_slices:
            last = open_slices[-1]
            stop = open_start + last.offset + last.stop - last.start
            buckets.append(Bucket(open_start, stop, tuple(open_slices)))
            open_slices.clear()

    for number, (tensor, offset) in enumerate(zip(schema.tensors, schema.offsets, strict=True)):
        if tensor.size >= DIRECT_BYTES:
            close()
        start = 0
        while start < tensor.size:
            if not open_slices:
                open_start = offset + start
            room = open_start + bucket_size - (offset + start)
            if room <= 0:
                close()
                continue
            stop = min(tensor.size, start + room)
            open_slices.append(Slice(number, start, stop, offset + start - open_start))
            start = stop
        if tensor.size >= DIRECT_BYTES:
            close()
    close()
    return buckets


def pieces_of(data: memoryview) -> Iterator[memoryview]:
    """``data`` in order, as much at once as a core's own cache holds."""
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def under_names(
    offered: Sequence[TensorMeta],
    also: Mapping[str, Sequence[str]],
    expected: Sequence[TensorMeta],
) -> list[TensorMeta]:
    """The offered tensors, tied ones under those of their names that are expected.

    Args:
        also: further names of a tensor, by the name under which it comes.
    """
    wanted = {meta.name for meta in expected}
    named = []
    for meta in offered:
        names = [name for name in (meta.name, *also.get(meta.name, ())) if name in wanted]
        named += [replace(meta, name=name) for name in names or [meta.name]]
    return named


def differences(expected: Sequence[TensorMeta], offered: Sequence[TensorMeta]) -> str | None:
    """Why ``offered`` cannot be loaded where ``expected`` is wanted, in one sentence.

    The order of the tensors does not matter. None when nothing differs.
    """
    wanted = {tensor.name: tensor for tensor in expected}
    given = {tensor.name: tensor for tensor in offered}
    found = [
        f"{name} is missing"
        if name not in given
        else f"{name} is {given[name]} instead of {tensor}"
        for name, tensor in wanted.items()
        if given.get(name) != tensor
    ]
    found += [f"{name} is not expected" for name in given if name not in wanted]
    if len(given) != len(offered):
        found.append("a name comes twice")
    if not found:
        return None
    more = len(found) - _MOST_DIFFERENCES
    return f"the weights do not fit the model: {'; '.join(found[:_MOST_DIFFERENCES])}" + (
        f"; and {more} more differences" if more > 0 else ""
    )
