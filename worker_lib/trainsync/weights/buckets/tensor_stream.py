"""The trainer's side of a stream: tensors as they come from an iterator, into buckets."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from trainsync.dist.sharded import is_dtensor
from trainsync.weights.buckets.host_copy import HostCopy
from trainsync.weights.buckets.layout import (
    DIRECT_BYTES,
    PIECE_BYTES,
    Bucket,
    Slice,
    StreamSchema,
    TensorMeta,
    pieces_of,
)
from trainsync.weights.buckets.tensor_part import TensorPart, dense
from trainsync.weights.errors import GroupFailedError, UnsupportedWeightsError

Value = torch.Tensor | TensorPart
NamedTensors = Iterable[tuple[str, Value]]

_END: Final = None


@dataclass(frozen=True)
class Description:
    """The tensors that an iterator is going to give, known before they are gathered.

    Attributes:
        device: of the first tensor.
        also: further names of a tensor, by the name under which it comes.
    """

    schema: StreamSchema
    device: torch.device
    also: Mapping[str, Sequence[str]] = field(default_factory=dict)


Describe = Callable[[], Description | None]
"""None where only the tensors themselves show it. Called often; no collective."""


class SchemaChangedError(Exception):
    """The iterator gives other tensors than the schema says. Never leaves the package."""


def schema_of(tensors: NamedTensors) -> StreamSchema:
    """Names, dtypes and shapes, one tensor at a time; the data is not looked at.

    Raises:
        UnsupportedWeightsError: a value is not a full dense tensor, a name comes twice, or there is
            no tensor at all.
    """
    remaining = iter(tensors)
    try:
        metas = [
            _meta(name, value)
            for name, value in remaining
            if not (isinstance(value, TensorPart) and value.start)
        ]
    except UnsupportedWeightsError:
        for _ in remaining:  # other ranks may gather along
            pass
        raise
    if not metas:
        raise UnsupportedWeightsError("there is no tensor; expected those of a model")
    names = [meta.name for meta in metas]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UnsupportedWeightsError(f"{twice} comes twice")
    return StreamSchema(tuple(metas))


class StreamSource:
    """Fills one bucket after the other from an iterator, which it reads once and in order.

    Of a tensor on a GPU, pieces come to the host while those before are used.
    """

    def __init__(self, schema: StreamSchema, tensors: NamedTensors) -> None:
        self._schema = schema
        self._tensors: Iterator[tuple[str, Value]] = iter(tensors)
        self._number = -1
        self._raw: torch.Tensor | None = None  # bytes of the tensor or part that came last
        self._start = 0  # their place in the tensor
        self._is_part = False  # then the next one overwrites it
        self._host_copy = HostCopy()

    def _alone(self, bucket: Bucket) -> Slice | None:
        """The bucket's one slice, if it is of a large tensor."""
        first = bucket.slices[0]
        large = self._schema.tensors[first.tensor].size >= DIRECT_BYTES
        return first if large and len(bucket.slices) == 1 else None

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes (uint8, contiguous, on the CPU).

        They lie in ``buffer`` (at least ``bucket.size`` long), or in the tensor itself, if that is
        large and contiguous on the CPU: then it must not change before the bucket is sent.

        Raises:
            SchemaChangedError: the iterator gives something else than the schema says.
            UnsupportedWeightsError: a value is not a full dense tensor.
        """
        alone = self._alone(bucket)
        if alone is not None:
            raw = self._from(alone.tensor, alone.start)
            start = alone.start - self._start
            if raw.device.type == "cpu" and not self._is_part:
                return raw[start : start + bucket.size]
            del raw  # at most one tensor is held
        return self.pack(bucket, buffer)

    def pack(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes in ``buffer`` (uint8, of at least its size, on any device).

        Raises: as `fill`.
        """
        data = buffer[: bucket.size]
        end = 0
        for piece in bucket.slices:
            if piece.offset > end:  # on a GPU a call costs as much for no byte as for a megabyte
                data[end : piece.offset].zero_()
            end = piece.offset
            for raw in self._ranges(piece):
                data[end : end + raw.numel()].copy_(raw)
                end += raw.numel()
                del raw  # at most one tensor is held
        return data

    def pieces(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[memoryview]:
        """The bucket's bytes in order, each piece valid until the next one is asked for.

        They lie in ``buffer`` (at least ``bucket.size`` long), or in the tensor itself, as with
        `fill`.

        Raises: as `fill`.
        """
        alone = self._alone(bucket)
        if alone is None:
            yield from self.lay(bucket, buffer[: bucket.size])
            return
        for raw in self._ranges(alone):
            for part in self._on_host(raw):
                yield from pieces_of(part.numpy().data)
                del part
            del raw  # at most one tensor is held

    def lay(self, bucket: Bucket, target: torch.Tensor) -> Iterator[memoryview]:
        """Copy the bucket's bytes to ``target`` (uint8, of its size, contiguous, on the CPU).

        Yields:
            All of them, in order, while a core's own cache still has them.

        Raises: as `fill`.
        """
        data = target.numpy()
        view = data.data
        end = told = 0
        for piece in bucket.slices:
            data[end : piece.offset] = 0
            end = piece.offset
            for raw in self._ranges(piece):
                for part in self._on_host(raw):
                    array = part.numpy()
                    for start in range(0, len(array), PIECE_BYTES):
                        few = array[start : start + PIECE_BYTES]
                        np.copyto(data[end : end + len(few)], few)
                        end += len(few)
                        if end - told >= PIECE_BYTES:
                            yield view[told:end]
                            told = end
                    del few, array, part
                del raw  # at most one tensor is held
        if end > told:
            yield view[told:end]

    def finish(self) -> None:
        """After the last bucket: what is left must be empty tensors, as the schema says.

        Raises:
            SchemaChangedError: there is more, or less.
        """
        while self._number + 1 < len(self._schema.tensors):
            self._advance()
        self._raw = None
        more = next(self._tensors, _END)
        if more is not _END:
            raise SchemaChangedError(f"{more[0]} is new")

    def drain(self) -> None:
        """Read the iterator to its end.

        A sharded model's iterator gathers each tensor from every rank: one that stops early leaves
        the other ranks waiting.
        """
        self._raw = None
        for _ in self._tensors:
            pass

    def _on_host(self, raw: torch.Tensor) -> Iterator[torch.Tensor]:
        return iter([raw]) if raw.device.type == "cpu" else self._host_copy.pieces(raw)

    def _ranges(self, piece: Slice) -> Iterator[torch.Tensor]:
        """The slice's bytes in order, in as many tensors as they came in."""
        at = piece.start
        while at < piece.stop:
            raw = self._from(piece.tensor, at)
            raw = raw[at - self._start : piece.stop - self._start]
            at += raw.numel()
            yield raw
            del raw  # at most one tensor is held

    def _from(self, number: int, start: int) -> torch.Tensor:
        """The bytes that came last, which have byte ``start`` of the tensor among them."""
        while self._number < number:
            self._advance()
        while self._raw is not None and self._start + self._raw.numel() <= start:
            self._next_part()
        if self._raw is None:
            raise RuntimeError(f"tensor {number} is asked for after tensor {self._number}")
        return self._raw

    def _advance(self) -> None:
        self._number += 1
        self._raw = None  # at most one tensor is held
        expected = self._schema.tensors[self._number]
        given = next(self._tensors, _END)
        if given is _END:
            raise SchemaChangedError(f"{expected.name} is missing")
        meta = _meta(*given)
        if meta != expected:
            raise SchemaChangedError(f"{meta.name} {meta} comes instead of {expected.name}")
        self._take(given[1], 0)

    def _next_part(self) -> None:
        assert self._raw is not None
        start = self._start + self._raw.numel()
        self._raw = None  # at most one part is held
        expected = self._schema.tensors[self._number]
        name, value = next(self._tensors, (None, None))
        if name != expected.name or not isinstance(value, TensorPart):
            raise SchemaChangedError(f"{expected.name} ends after {start} of {expected.size} bytes")
        self._take(value, start)

    def _take(self, value: Value, start: int) -> None:
        if isinstance(value, TensorPart) and value.start * value.data.element_size() != start:
            raise RuntimeError(f"a part begins at element {value.start}; expected byte {start}")
        self._raw = dense(value).detach().contiguous().reshape(-1).view(torch.uint8)
        self._start = start
        self._is_part = isinstance(value, TensorPart)


def _meta(name: str, value: object) -> TensorMeta:
    tensor = value.data if isinstance(value, TensorPart) else value
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedWeightsError(f"{name} is a {type(tensor).__name__}; expected a tensor")
    if is_dtensor(tensor):
        raise UnsupportedWeightsError(f"{name} is sharded; expected a full tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UnsupportedWeightsError(f"{name} is not a dense tensor with data")
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = value.shape if isinstance(value, TensorPart) else tensor.shape
    return TensorMeta(name, dtype, tensor.element_size(), tuple(shape))


def check_time(deadline: float) -> None:
    """Look at a version's deadline, on the monotonic clock.

    Raises:
        GroupFailedError: it has passed.
    """
    if time.monotonic() >= deadline:
        raise GroupFailedError("the version's deadline has passed")
