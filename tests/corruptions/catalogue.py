"""What can go wrong with weights on their way into a server: each fault as a function of states.

Beside each fault stands what can see it: a fault in what the trainer publishes leaves a server's
layers as they were staged, and some change what a model computes by less than its rounding.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from tests.corruptions.versions import EMBEDDING, HEAD, State

Fault = Callable[[random.Random, State, State], State]
"""From the version before and the new one to what the server computes with."""

BUCKET: Final = 0.03  # of the bytes of a version, as 512 MiB are of 15 GiB


@dataclass(frozen=True)
class Corruption:
    """A class of faults.

    Attributes:
        old: it leaves something of the version before; how far that is off is up to the step.
        staged: it is in what is published and staged, so that a server's layers have what was
            staged.
    """

    name: str
    fault: Fault
    old: bool = False
    staged: bool = False


def _stale(rng: random.Random, old: State, new: State) -> State:
    return dict(old)


def _lost(rng: random.Random, old: State | None, new: State) -> State:
    """A range of a bucket's length of the stream of all tensors is as in ``old``, or zero."""
    total = sum(tensor.numel() for tensor in new.values())
    length = int(BUCKET * total)
    start = rng.randrange(total - length)
    found, offset = {}, 0
    for name, tensor in new.items():
        first, last = max(start - offset, 0), min(start + length - offset, tensor.numel())
        offset += tensor.numel()
        if first < last:
            flat = tensor.reshape(-1).clone()
            flat[first:last] = 0 if old is None else old[name].reshape(-1)[first:last]
            tensor = flat.reshape(tensor.shape)
        found[name] = tensor
    return found


def _lost_old(rng: random.Random, old: State, new: State) -> State:
    return _lost(rng, old, new)


def _lost_zero(rng: random.Random, old: State, new: State) -> State:
    return _lost(rng, None, new)


def _swapped(rng: random.Random, old: State, new: State) -> State:
    """Two matrices of the same shape."""
    shapes: dict[torch.Size, list[str]] = {}
    for name in _matrices(new):
        shapes.setdefault(new[name].shape, []).append(name)
    one, other = rng.sample(rng.choice([s for s in shapes.values() if len(s) > 1]), 2)
    return {**new, one: new[other], other: new[one]}


def _gate_and_up(rng: random.Random, old: State, new: State) -> State:
    """In one layer, as fused in the wrong order."""
    gates = [name for name in new if ".gate_proj." in name]
    if gates:
        gate = rng.choice(gates)
        up = gate.replace("gate_proj", "up_proj")
        return {**new, gate: new[up], up: new[gate]}
    name = rng.choice([name for name in new if name.endswith("experts.gate_up_proj")])
    gate_half, up_half = new[name].chunk(2, dim=1)
    return {**new, name: torch.cat([up_half, gate_half], dim=1)}


def _transposed(rng: random.Random, old: State, new: State) -> State:
    name = rng.choice([n for n in _matrices(new) if new[n].shape[-1] == new[n].shape[-2]])
    return {**new, name: new[name].transpose(-1, -2).contiguous()}


def _shifted(rng: random.Random, old: State, new: State) -> State:
    """The rows of a matrix lie one shard, of two, four or eight, too far."""
    name = rng.choice(_matrices(new))
    rows = new[name].shape[-2]
    return {**new, name: new[name].roll(rows // rng.choice([2, 4]), dims=-2)}


def _scaled(rng: random.Random, old: State, new: State) -> State:
    """The scale of a quantised tensor is wrong by a power of two."""
    name = rng.choice(_matrices(new))
    return {**new, name: new[name] * rng.choice([0.25, 0.5, 2.0, 4.0])}


def _without_adapter(rng: random.Random, old: State, new: State) -> State:
    """Low-rank parts are missing: the trainer published the base model alone, or merged into the
    half of the layers. ``new`` less a rank-4 part of 3 % of the norm of each matrix."""
    found = dict(new)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for name in _matrices(new):
        if "_proj" in name and new[name].dim() == 2:
            rows, columns = new[name].shape
            part = torch.randn(rows, 4, generator=generator) @ torch.randn(
                4, columns, generator=generator
            )
            part *= 0.03 * new[name].float().norm() / part.norm()
            found[name] = (new[name].float() - part).bfloat16()
    return found


def _mixed(rng: random.Random, old: State, new: State) -> State:
    """Each tensor is of either version; at least a quarter is old."""
    names = list(new)
    kept = set(rng.sample(names, rng.randrange(len(names) // 4, len(names))))
    return {name: old[name] if name in kept else new[name] for name in names}


def _rank_stale(rng: random.Random, old: State, new: State) -> State:
    """One of two tensor parallel ranks: half of each matrix is old, by rows or by columns."""
    rank = rng.randrange(2)
    found = dict(new)
    for name in _matrices(new):
        by_columns = "o_proj" in name or "down_proj" in name
        halves = [list(state[name].chunk(2, -1 if by_columns else -2)) for state in (old, new)]
        halves[1][rank] = halves[0][rank]
        found[name] = torch.cat(halves[1], -1 if by_columns else -2)
    return found


def _head_forgotten(rng: random.Random, old: State, new: State) -> State:
    """A head that is packed, and tied, is still that of the version before."""
    return {**new, HEAD: old[HEAD]}


def _experts_forgotten(rng: random.Random, old: State, new: State) -> State:
    """Packed feed-forward weights, or experts, are still those of the version before."""
    return {name: old[name] if ".mlp." in name else new[name] for name in new}


def _fp8(rng: random.Random, old: State, new: State) -> State:
    """All matrices rounded to fp8 with a scale for each tensor, as `quantization=fp8` does it."""
    found = dict(new)
    for name in _matrices(new):
        if name not in (EMBEDDING, HEAD):
            scale = new[name].abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
            rounded = (new[name].float() / scale).to(torch.float8_e4m3fn)
            found[name] = (rounded.float() * scale).bfloat16()
    return found


def _norm_zeroed(rng: random.Random, old: State, new: State) -> State:
    name = rng.choice([name for name in new if "norm" in name])
    return {**new, name: torch.zeros_like(new[name])}


def _matrices(state: State) -> list[str]:
    return [name for name, tensor in state.items() if tensor.dim() >= 2]


CATALOGUE: Final = (
    Corruption("stale weights", _stale, old=True),
    Corruption("a lost bucket, with old bytes", _lost_old, old=True),
    Corruption("a lost bucket, with zeros", _lost_zero),
    Corruption("two tensors swapped", _swapped),
    Corruption("gate and up swapped", _gate_and_up),
    Corruption("a square matrix transposed", _transposed),
    Corruption("a shifted shard", _shifted),
    Corruption("a wrong scale", _scaled),
    Corruption("an adapter that was not published", _without_adapter, staged=True),
    Corruption("mixed versions", _mixed, old=True),
    Corruption("one tensor parallel rank stale", _rank_stale, old=True),
    Corruption("a packed head forgotten", _head_forgotten, old=True),
    Corruption("packed layers forgotten", _experts_forgotten, old=True),
    Corruption("rounding to fp8", _fp8),
    Corruption("a norm zeroed", _norm_zeroed),
)
