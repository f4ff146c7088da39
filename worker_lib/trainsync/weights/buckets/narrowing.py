"""Weights that travel in a narrower dtype than they are trained in: float32 masters as bfloat16."""

from collections.abc import Iterator

import torch

from trainsync.weights.buckets.tensor_part import PART_BYTES, TensorPart


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
