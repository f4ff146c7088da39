"""Parts of a tensor that is too large to be held whole only to be sent, and its narrower dtype.

Weights may travel in a narrower dtype than they are trained in: float32 masters as bfloat16.
"""

from collections.abc import Iterator
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


def check_narrow(dtype: torch.dtype | None) -> None:
    """Raises `ValueError`: ``dtype`` is given, and is not one of floating point."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"weights cannot travel as {dtype}; expected a dtype of floating point, such as "
            "torch.bfloat16, or None for the dtypes that they have"
        )


def travels_as(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor of dtype ``own`` travels.

    ``wanted``, if both are of floating point and it is narrower; else ``own``: nothing is widened,
    and integers stay integers.
    """
    if wanted is None or not own.is_floating_point or own.itemsize <= wanted.itemsize:
        return own
    return wanted


def narrowed_parts(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[TensorPart]:
    """A full tensor as ``dtype``, in parts, so that no second copy of a large one is made."""
    flat = tensor.detach().contiguous().reshape(-1)
    step = PART_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        yield TensorPart(tuple(tensor.shape), start, flat[start : start + step].to(dtype))
