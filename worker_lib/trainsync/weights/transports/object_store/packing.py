"""One rank's share of a state dict: its pieces, in buckets that are each one object for Ray.

A bucket is a list of byte arrays. Those of contiguous CPU tensors are views, so that the only copy
is the one that Ray makes into its object store.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import xxhash

from trainsync.dist.sharded import is_dtensor
from trainsync.weights.buckets.schema import Schema, SchemaEntry
from trainsync.weights.buckets.tensor_part import travels_as
from trainsync.weights.errors import UnsupportedWeightsError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BUCKET_BYTES: Final = 64 << 20
"""An explorer fetches whole buckets, and what is not a contiguous CPU tensor is copied bucket by
bucket: large enough that their number is small, small enough that neither costs much memory."""


@dataclass(frozen=True)
class UploadBucket:
    """Arrays of uint8, each of shape (n,), to be sent as one object; they may be views."""

    arrays: tuple[Bytes, ...]
    digest: str

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


class Packing:
    """One rank's share of a state dict: its shards, and on rank 0 what is not sharded.

    Tensors that share all their memory (tied weights) are sent once. A tensor is never split, so
    one that is larger than ``limit`` has a bucket for itself.

    Args:
        state: it must not change until the buckets are sent.
        limit: bytes of a bucket.
        narrow: what is wider travels as this dtype; see `travels_as`.

    Raises:
        UnsupportedWeightsError: a value is not a dense tensor, or waits for a reduction.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        rank: int,
        limit: int = BUCKET_BYTES,
        narrow: torch.dtype | None = None,
    ) -> None:
        self._narrow = narrow
        self._buckets: list[list[torch.Tensor]] = []
        pieces: list[SchemaEntry] = []
        places: dict[object, tuple[int, int]] = {}
        filled = 0
        for name, value in state.items():
            owned = _owned(name, value, rank)
            if owned is None:
                continue
            local, full, start = owned
            identity = _identity(local)
            sent = travels_as(local.dtype, narrow)
            if identity not in places:
                size = local.numel() * sent.itemsize
                if not self._buckets or filled + size > limit:
                    self._buckets.append([])
                    filled = 0
                filled += size
                self._buckets[-1].append(local)
                places[identity] = len(self._buckets) - 1, len(self._buckets[-1]) - 1
            dtype = str(sent).removeprefix("torch.")
            itemsize, shape = sent.itemsize, tuple(local.shape)
            pieces.append(SchemaEntry(name, dtype, itemsize, full, start, shape, *places[identity]))
        self.schema = Schema(tuple(pieces))

    def buckets(self) -> Iterator[UploadBucket]:
        """The buckets in order; each is valid until the next one is asked for."""
        for tensors in self._buckets:
            arrays = tuple(_bytes_of(tensor, self._narrow) for tensor in tensors)
            yield UploadBucket(arrays, digest_of(arrays))
            del arrays  # before the copies in the next one are made


class StreamPacking:
    """One rank's share of full tensors that all ranks are given one after the other.

    Every tensor falls to the rank that has the fewest bytes so far, so all ranks must be given the
    same. Besides one bucket and the tensor at hand nothing is held.

    Args:
        limit: bytes of a bucket.
        also: further names of a tensor, by the name under which it comes.
        narrow: see `Packing`.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        rank: int,
        world_size: int,
        limit: int = BUCKET_BYTES,
        also: Mapping[str, Sequence[str]] | None = None,
        narrow: torch.dtype | None = None,
    ) -> None:
        self._tensors = tensors
        self._narrow = narrow
        self._also = also or {}
        self._rank = rank
        self._loads = [0] * world_size
        self._limit = limit
        self._pieces: list[SchemaEntry] = []

    @property
    def schema(self) -> Schema:
        """The schema of this rank's tensors; complete after the last bucket."""
        return Schema(tuple(self._pieces))

    def buckets(self) -> Iterator[UploadBucket]:
        """The buckets in order, once.

        Raises:
            UnsupportedWeightsError: a value is not a full dense tensor.
        """
        arrays: list[Bytes] = []
        filled = number = 0
        for name, tensor in self._tensors:
            if is_dtensor(tensor):
                raise UnsupportedWeightsError(f"{name} is sharded; expected a full tensor")
            dense = _dense(name, tensor)
            owner = min(range(len(self._loads)), key=self._loads.__getitem__)
            sent = travels_as(dense.dtype, self._narrow)
            nbytes = dense.numel() * sent.itemsize
            self._loads[owner] += nbytes
            if owner != self._rank:
                continue
            if arrays and filled + nbytes > self._limit:
                yield UploadBucket(tuple(arrays), digest_of(arrays))
                arrays, filled, number = [], 0, number + 1
            filled += nbytes
            dtype, shape = str(sent).removeprefix("torch."), tuple(dense.shape)
            start = (0,) * dense.dim()
            place = number, len(arrays)
            self._pieces += [
                SchemaEntry(given, dtype, sent.itemsize, shape, start, shape, *place)
                for given in (name, *self._also.get(name, ()))
            ]
            arrays.append(_bytes_of(dense, self._narrow))
        if arrays:
            yield UploadBucket(tuple(arrays), digest_of(arrays))


def digest_of(arrays: Sequence[Bytes]) -> str:
    """xxh3-128 of the bytes of all arrays, as in receipts."""
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(array.data)
    return f"xxh3-128:{hasher.hexdigest()}"


def digest_of_part(digests: Sequence[str]) -> str:
    """One digest for a part, of those of its buckets."""
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(' '.join(digests).encode())}"


def _bytes_of(tensor: torch.Tensor, narrow: torch.dtype | None) -> Bytes:
    sent = tensor.detach().to(travels_as(tensor.dtype, narrow))
    host = sent.resolve_conj().resolve_neg().cpu().contiguous()
    data: Bytes = host.reshape(-1).view(torch.uint8).numpy()
    return data


def _identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same bytes of the same memory."""
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return object()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


_Owned = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]


def _owned(name: str, value: object, rank: int) -> _Owned | None:
    """(local tensor, full shape, start) of what ``rank`` sends of a tensor; None for nothing."""
    if is_dtensor(value):
        return _owned_of_sharded(name, value)
    if not isinstance(value, torch.Tensor):
        raise UnsupportedWeightsError(f"{name} is a {type(value).__name__}; expected a tensor")
    if rank != 0:
        return None
    return _dense(name, value), tuple(value.shape), (0,) * value.dim()


def _owned_of_sharded(name: str, value: "DTensor") -> _Owned | None:
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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


def _dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UnsupportedWeightsError(f"{name} is not a dense tensor with data")
    return tensor
