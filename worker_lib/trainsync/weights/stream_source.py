"""The trainer's side of a stream: tensors as they come from an iterator, into buckets."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trainsync.weights.buckets import DIRECT_BYTES, Bucket, StreamSchema, TensorMeta
from trainsync.weights.chain import PIECE_BYTES, pieces_of
from trainsync.weights.errors import UnsupportedWeightsError

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_END: Final = None


class SchemaChangedError(Exception):
    """The iterator gives other tensors than the schema says. Never leaves the package."""


def schema_of(tensors: NamedTensors) -> StreamSchema:
    """Names, dtypes and shapes, one tensor at a time; the data is not looked at.

    Raises:
        UnsupportedWeightsError: a value is not a full dense tensor, or a name comes twice.
    """
    remaining = iter(tensors)
    try:
        metas = [_meta(name, tensor) for name, tensor in remaining]
    except UnsupportedWeightsError:
        for _ in remaining:  # other ranks may gather along
            pass
        raise
    names = [meta.name for meta in metas]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UnsupportedWeightsError(f"{twice} comes twice")
    return StreamSchema(tuple(metas))


class StreamSource:
    """Fills one bucket after the other from an iterator, which it reads once and in order."""

    def __init__(self, schema: StreamSchema, tensors: NamedTensors) -> None:
        self._schema = schema
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(tensors)
        self._number = -1
        self._tensor: torch.Tensor | None = None
        self._raw: torch.Tensor | None = None

    def _direct(self, bucket: Bucket) -> torch.Tensor | None:
        first = bucket.slices[0]
        if len(bucket.slices) > 1 or self._schema.tensors[first.tensor].size < DIRECT_BYTES:
            return None
        source = self._bytes(first.tensor)[first.start : first.stop]
        return source if source.device.type == "cpu" else None

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes (uint8, contiguous, on the CPU).

        They lie in ``buffer`` (at least ``bucket.size`` long), or in the tensor itself, if that is
        large and contiguous on the CPU: then it must not change before the bucket is sent.

        Raises:
            SchemaChangedError: the iterator gives something else than the schema says.
            UnsupportedWeightsError: a value is not a full dense tensor.
        """
        source = self._direct(bucket)
        if source is not None:
            return source
        return self.pack(bucket, buffer)

    def pack(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes in ``buffer`` (uint8, of at least its size, on any device).

        Raises: as `fill`.
        """
        data = buffer[: bucket.size]
        end = 0
        for piece in bucket.slices:
            data[end : piece.offset].zero_()
            end = piece.offset + piece.stop - piece.start
            data[piece.offset : end].copy_(self._bytes(piece.tensor)[piece.start : piece.stop])
        return data

    def pieces(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[memoryview]:
        """The bucket's bytes in order, each piece valid until the next one is asked for.

        They lie in ``buffer`` (at least ``bucket.size`` long), or in the tensor itself, as with
        `fill`.

        Raises: as `fill`.
        """
        source = self._direct(bucket)
        if source is None:
            yield from self.lay(bucket, buffer[: bucket.size])
            return
        yield from pieces_of(source.numpy().data)

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
            raw = self._bytes(piece.tensor)[piece.start : piece.stop].cpu().numpy()
            for start in range(0, len(raw), PIECE_BYTES):
                part = raw[start : start + PIECE_BYTES]
                np.copyto(data[end : end + len(part)], part)
                end += len(part)
                if end - told >= PIECE_BYTES:
                    yield view[told:end]
                    told = end
            del raw, part  # at most one tensor is held
        if end > told:
            yield view[told:end]

    def finish(self) -> None:
        """After the last bucket: what is left must be empty tensors, as the schema says.

        Raises:
            SchemaChangedError: there is more, or less.
        """
        while self._number + 1 < len(self._schema.tensors):
            self._advance()
        self._tensor = self._raw = None
        more = next(self._tensors, _END)
        if more is not _END:
            raise SchemaChangedError(f"{more[0]} is new")

    def drain(self) -> None:
        """Read the iterator to its end.

        A sharded model's iterator gathers each tensor from every rank: one that stops early leaves
        the other ranks waiting.
        """
        self._tensor = self._raw = None
        for _ in self._tensors:
            pass

    def _bytes(self, number: int) -> torch.Tensor:
        while self._number < number:
            self._advance()
        if self._raw is None:
            if self._tensor is None:
                raise RuntimeError(f"tensor {number} is asked for after tensor {self._number}")
            self._raw = self._tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return self._raw

    def _advance(self) -> None:
        self._number += 1
        self._tensor = self._raw = None  # at most one tensor is held
        expected = self._schema.tensors[self._number]
        given = next(self._tensors, _END)
        if given is _END:
            raise SchemaChangedError(f"{expected.name} is missing")
        meta = _meta(*given)
        if meta != expected:
            raise SchemaChangedError(f"{meta.name} {meta} comes instead of {expected.name}")
        self._tensor = given[1]


def _meta(name: str, tensor: object) -> TensorMeta:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedWeightsError(f"{name} is a {type(tensor).__name__}; expected a tensor")
    if isinstance(tensor, DTensor):
        raise UnsupportedWeightsError(f"{name} is sharded; expected a full tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UnsupportedWeightsError(f"{name} is not a dense tensor with data")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorMeta(name, dtype, tensor.element_size(), tuple(tensor.shape))
