"""A part of a full tensor, for tensors too large to be held whole only to be sent."""

from dataclasses import dataclass
from typing import Final

import torch

PART_BYTES: Final = 4 << 20
"""Of a part, but for a tensor's last. Two are held, one used and one on its way: half a bucket of
the usual size. A multiple of the chunks in which a `DeviceDigest` looks at a tensor."""


@dataclass(frozen=True)
class TensorPart:
    """Some elements of a full tensor. The parts come in order, without a gap, under its name.

    Attributes:
        shape: of the whole tensor.
        start: place of the first element in the whole, row-major.
        data: the elements, of shape (n,), contiguous; valid until the next one is asked for. Only
            a tensor's last part has another size than `PART_BYTES`.
    """

    shape: tuple[int, ...]
    start: int
    data: torch.Tensor


def dense(value: torch.Tensor | TensorPart) -> torch.Tensor:
    """The elements that came."""
    return value.data if isinstance(value, TensorPart) else value
