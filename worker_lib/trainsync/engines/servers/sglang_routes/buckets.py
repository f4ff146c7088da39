"""Whole tensors in buckets, packed without gaps, each where its dtype may begin."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

BUCKET_BYTES: Final = 256 << 20
"""Of a bucket at most, unless one tensor has more."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor in a bucket; ``offset`` and ``size`` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class TensorBucket:
    """Tensors one behind the other: those of larger elements first, so that each is aligned."""

    parts: tuple[PackedTensor, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        last = self.parts[-1]
        return last.offset + last.size

    def pack(self, tensors: Mapping[str, torch.Tensor], into: torch.Tensor) -> torch.Tensor:
        """Copy the bytes of its tensors.

        Args:
            into: uint8, of at least its size.

        Returns:
            The bytes of ``into`` that they take.
        """
        for part in self.parts:
            place = into[part.offset : part.offset + part.size].view(part.dtype)
            place.view(part.shape).copy_(tensors[part.name])
        return into[: self.size]


def in_buckets(tensors: Mapping[str, torch.Tensor], most: int) -> list[TensorBucket]:
    """All of the tensors, in their order from bucket to bucket."""
    buckets: list[list[str]] = []
    filled = 0
    for name, tensor in tensors.items():
        if not buckets or filled + tensor.nbytes > most:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += tensor.nbytes
    return [_bucket({name: tensors[name] for name in names}) for names in buckets]


def _bucket(tensors: Mapping[str, torch.Tensor]) -> TensorBucket:
    parts, offset = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda named: -named[1].itemsize):
        parts.append(PackedTensor(name, tensor.dtype, tuple(tensor.shape), offset, tensor.nbytes))
        offset += tensor.nbytes
    return TensorBucket(tuple(parts))
