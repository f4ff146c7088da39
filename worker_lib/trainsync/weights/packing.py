"""One rank's share of a state dict as one flat array of bytes, and full tensors out of all shares.

Flat byte arrays are what Ray's object store moves fast and reads without a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainsync.weights.errors import InconsistentUploadError, UnsupportedWeightsError
from trainsync.weights.schema import ALIGNMENT, Piece, Schema, check_cover

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Packed:
    """One rank's share: ``data`` is uint8 of shape (n,) and belongs to the packer."""

    data: Bytes
    schema: Schema
    digest: str


class Packer:
    """Packs again and again into the same memory, which so stays warm. One thread at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def pack(self, state: Mapping[str, torch.Tensor], rank: int) -> Packed:
        """Copy what ``rank`` owns of ``state``: its shards, and on rank 0 what is not sharded.

        The result is valid until the next `pack`.

        Raises:
            UnsupportedWeightsError: a value is not a dense tensor, or waits for a reduction.
        """
        owned = [
            (name, share)
            for name, t in state.items()
            if (share := _owned(name, t, rank)) is not None
        ]
        pieces: list[Piece] = []
        offset = 0
        for name, (local, full, start) in owned:
            dtype = str(local.dtype).removeprefix("torch.")
            shape = tuple(local.shape)
            pieces.append(Piece(name, dtype, local.element_size(), full, start, shape, offset))
            offset += -(-pieces[-1].size // ALIGNMENT) * ALIGNMENT
        if self._memory.numel() < offset:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._memory = torch.zeros(offset, dtype=torch.uint8)
        with torch.no_grad():
            for piece, (_, (local, _, _)) in zip(pieces, owned, strict=True):
                raw = self._memory[piece.offset : piece.offset + piece.size]
                raw.view(local.dtype).view(piece.shape).copy_(local)
        data: Bytes = self._memory[:offset].numpy()
        return Packed(data, Schema(tuple(pieces)), digest_of(data))


def digest_of(data: Bytes) -> str:
    """xxh3-128 of the bytes, as in receipts."""
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data.data)}"


def unpack(parts: Sequence[tuple[Bytes, Schema]]) -> dict[str, torch.Tensor]:
    """Full CPU tensors out of every rank's part, in the order of the parts' names.

    Args:
        parts: read-only arrays will do; the tensors own their memory.

    Raises:
        InconsistentUploadError: the parts do not cover every tensor exactly once, or an array is
            short.
    """
    check_cover(schema for _, schema in parts)
    full: dict[str, torch.Tensor] = {}
    raw: dict[str, Bytes] = {}
    for data, schema in parts:
        for piece in schema.pieces:
            if piece.name not in full:
                tensor = full[piece.name] = torch.empty(piece.full_shape, dtype=_dtype(piece))
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                raw[piece.name] = memory.numpy()
            _place(raw[piece.name], data, piece)
    return full


def _place(full: Bytes, data: Bytes, piece: Piece) -> None:
    raw = data[piece.offset : piece.offset + piece.size]
    if raw.size != piece.size:
        raise InconsistentUploadError(
            f"{piece.name}: its part has {raw.size} bytes at {piece.offset}, expected {piece.size}"
        )
    # A last axis of bytes stands for the element, so that any dtype (bf16 too) is copied.
    target = full.reshape(*piece.full_shape, piece.itemsize)
    box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
    target[box] = raw.reshape(*piece.shape, piece.itemsize)


def _dtype(piece: Piece) -> torch.dtype:
    dtype = getattr(torch, piece.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != piece.itemsize:
        raise InconsistentUploadError(f"{piece.name}: unknown dtype {piece.dtype!r}")
    return dtype


_Owned = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]


def _owned(name: str, value: object, rank: int) -> _Owned | None:
    """(local tensor, full shape, start) of what ``rank`` sends of a tensor; None for nothing."""
    if isinstance(value, DTensor):
        coordinate = value.device_mesh.get_coordinate()
        if coordinate is None:
            return None
        for place, index in zip(value.placements, coordinate, strict=True):
            if isinstance(place, Partial):
                raise UnsupportedWeightsError(f"{name} waits for a reduction ({value.placements})")
            if isinstance(place, Replicate) and index != 0:
                return None  # another replica sends it
        full = tuple(value.shape)
        _, start = compute_local_shape_and_global_offset(full, value.device_mesh, value.placements)
        with torch.no_grad():
            local = value.to_local()
        return _dense(name, local), full, tuple(start)
    if not isinstance(value, torch.Tensor):
        raise UnsupportedWeightsError(f"{name} is a {type(value).__name__}; expected a tensor")
    if rank != 0:
        return None
    return _dense(name, value), tuple(value.shape), (0,) * value.dim()


def _dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UnsupportedWeightsError(f"{name} is not a dense tensor with data")
    return tensor
