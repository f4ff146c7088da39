"""Full tensors out of every rank's buckets: views where they can be, put together one by one else.

Nothing here knows where the buckets come from.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from trainsync.weights.buckets.schema import Schema, SchemaEntry
from trainsync.weights.errors import InconsistentUploadError, WeightsUnavailableError
from trainsync.weights.transports.object_store.packing import Bytes

Part = tuple[Schema, Mapping[int, Sequence[Bytes]]]
"""One rank's schema, and the arrays of its buckets by number: at least of those that are wanted."""


class Assembled(Mapping[str, torch.Tensor]):
    """CPU tensors by name, in the order of the parts' names.

    A tensor that came in one piece is a view of its array, and read-only if that is: torch does not
    keep other code from writing there. One that came in several is put together anew, in memory of
    its own, each time that it is asked for.

    Args:
        parts: of all ranks; `check_cover` holds for their schemas.
        names: which tensors.

    Raises:
        InconsistentUploadError: an array is missing or has another size than its schema says, or a
            dtype is none.
    """

    def __init__(self, parts: Sequence[Part], names: Sequence[str]) -> None:
        self._pieces: dict[str, list[tuple[SchemaEntry, Bytes]]] | None = {
            name: [] for name in names
        }
        for schema, buckets in parts:
            for piece in schema.pieces:
                if piece.name in self._pieces:
                    self._pieces[piece.name].append((piece, _array(buckets, piece)))

    def __getitem__(self, name: str) -> torch.Tensor:
        pieces = self._held()[name]
        first, _ = pieces[0]
        dtype, shape = _dtype(first), first.full_shape
        solid = [(piece, array) for piece, array in pieces if array.size]
        if len(solid) == 1:
            return _view(solid[0][1]).view(dtype).view(shape)
        try:
            full = torch.empty(shape, dtype=dtype)
        except (RuntimeError, MemoryError) as error:  # torch raises the one, Python the other
            raise WeightsUnavailableError(
                f"{name}: no memory to put {prod(shape) * dtype.itemsize} bytes together: {error}"
            ) from error
        for piece, array in solid:
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
            full[box].copy_(_view(array).view(dtype).view(piece.shape))
        return full

    def __iter__(self) -> Iterator[str]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    def release(self) -> None:
        """Let go of all arrays; tensors that are still referred to stay valid."""
        self._pieces = None

    def _held(self) -> dict[str, list[tuple[SchemaEntry, Bytes]]]:
        if self._pieces is None:
            raise WeightsUnavailableError(
                "these weights were acknowledged, or newer ones fetched; copy tensors to use later"
            )
        return self._pieces


class _Writable:
    """An array as torch wants it: `torch.from_numpy` warns of one that is read-only."""

    def __init__(self, array: Bytes) -> None:
        self._array = array  # keeps the memory
        interface: dict[str, Any] = dict(array.__array_interface__)
        interface["data"] = interface["data"][0], False
        self.__array_interface__ = interface


def _view(array: Bytes) -> torch.Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    return torch.from_numpy(np.asarray(_Writable(array)))


def _array(buckets: Mapping[int, Sequence[Bytes]], piece: SchemaEntry) -> Bytes:
    arrays = buckets.get(piece.bucket, ())
    found = arrays[piece.index].nbytes if piece.index < len(arrays) else None
    if found != piece.size:
        raise InconsistentUploadError(
            f"{piece.name}: array {piece.index} of bucket {piece.bucket} has {found} bytes, "
            f"expected {piece.size}"
        )
    _dtype(piece)
    return arrays[piece.index]


def _dtype(piece: SchemaEntry) -> torch.dtype:
    dtype = getattr(torch, piece.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != piece.itemsize:
        raise InconsistentUploadError(f"{piece.name}: unknown dtype {piece.dtype!r}")
    return dtype
