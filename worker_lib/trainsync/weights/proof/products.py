"""What a layer computes with: its weights' bytes, or its products where none can be read.

A kernel that packs weights into a layout of its own leaves nothing to compare. But a layer computes
``probe @ weight.T``, and the probes are of ones: the exact product is known to less than one
rounding, so that single weights which are off by one step of their dtype show.
"""

import math
import random
from typing import Final

import torch

PROBES: Final = 16
_ACCUMULATED: Final = 2.0**-24  # unit roundoff of float32, in which kernels sum
_SIGMAS: Final = 2.0


def sampled_rows(count: int, rng: random.Random, most: int) -> torch.Tensor:
    """Indices of the rows of a layer to look at, in order: int64, at most ``most`` of ``count``."""
    if count <= most:
        return torch.arange(count)
    return torch.tensor(sorted(rng.sample(range(count), most)), dtype=torch.int64)


def tells_layout(rows: torch.Tensor) -> bool:
    """Whether rows have more than one number: in any order, and sliced anyhow, others are equal."""
    numbers = rows.reshape(-1)
    return bool((numbers[1:] != numbers[:-1]).any())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the last bit, so that NaNs equal themselves."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))


def make_probes(columns: int, dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """Inputs of a layer, [16, columns]: each column is 1 or -1 in one of them, and 0 in the others.

    Few terms in a sum make its rounding small beside a change of one weight.
    """
    generator = torch.Generator().manual_seed(rng.randrange(1 << 62))
    places = torch.randperm(columns, generator=generator) % PROBES
    signs = torch.randint(0, 2, (columns,), generator=generator) * 2 - 1
    probes = torch.zeros(PROBES, columns, dtype=dtype)
    probes[places, torch.arange(columns)] = signs.to(dtype)
    return probes


def further_off(said: torch.Tensor, rows: torch.Tensor, probes: torch.Tensor) -> int:
    """How many products are further from the exact ones than a right kernel's.

    A right kernel sums in float32 and rounds once, to the dtype of ``said``. Errors of a sum of n
    terms are taken as ``2 * sqrt(n)`` roundings (Higham and Mary, "A New Approach to Probabilistic
    Rounding Error Analysis", 2019).

    Args:
        said: [probes, rows], by the layer.
        rows: [rows, columns], the weights that it should have.
        probes: [probes, columns], of `make_probes`.
    """
    exact = probes.double() @ rows.double().T
    sizes = probes.float().abs() @ rows.float().abs().T  # of a bound: float32 is exact enough
    terms = probes.float().abs().sum(1, keepdim=True)
    summed = (_SIGMAS * terms.sqrt() * _ACCUMULATED * sizes).double()
    kind = torch.finfo(said.dtype)
    largest = (exact.abs() + summed).clamp_min(kind.smallest_normal)
    rounded = 0.5 * kind.eps * torch.exp2(torch.floor(torch.log2(largest)))
    right = (said.double() - exact).abs() <= summed + rounded
    return math.prod(right.shape) - int(right.sum())
