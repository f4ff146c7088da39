"""Rows of the experts of a mixture as a worker of vLLM has them, beside those of a checkpoint."""

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from trainsync.weights.proof.products import same_bytes, sampled_rows, tells_layout

_NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Of an expert's tensors in a checkpoint: two that are fused by rows, and one."""
_ROWS: Final = 1024  # of all experts of a layer
_DIGIT: Final = 256  # every dtype of weights holds smaller whole numbers
_DIGITS: Final = 4


def right_experts(
    name: str, layer: RoutedExperts, tensors: Mapping[str, torch.Tensor], rng: random.Random
) -> dict[str, bool]:
    """The parameters of a layer of experts that have the weights of a checkpoint.

    Each with whether its rows are of more than one number.

    Args:
        name: of the layer, such as ``model.layers.0.mlp.experts.routed_experts``.
    """
    right: dict[str, bool] = {}
    if not isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
        return right
    if layer.expert_map is not None:  # this worker has some of the experts, under other numbers
        return right
    parent = name.rpartition(".")[0]
    experts = range(layer.w13_weight.shape[0])
    most = max(1, _ROWS // len(experts))
    expected = [_expected(f"{parent}.{number}", layer, tensors) for number in experts]
    found = [tensors for tensors in expected if tensors is not None]
    if len(found) < len(experts):
        return right
    gates, ups, downs = zip(*found, strict=True)
    for parameter, parts in (("w13_weight", (gates, ups)), ("w2_weight", (downs,))):
        value: torch.Tensor = getattr(layer, parameter)
        order = _order_of_kept(layer, value)
        height = value.shape[1] // len(parts)
        compared = [
            _compare(value, part, number * height, height, order, most, rng)
            for number, part in enumerate(parts)
        ]
        if None not in compared:
            right[f"{name}.{parameter}"] = all(compared)
    return right


def _expected(
    prefix: str, layer: Any, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Gate, up and down: [rows, columns] of this tensor parallel rank.

    None: the checkpoint does not have them, or has them in another form.
    """
    for names in _NAMES:
        gate, up, down = (tensors.get(f"{prefix}.{name}.weight") for name in names)
        if gate is not None and up is not None and down is not None:
            size, rank = layer.moe_config.tp_size, layer.moe_config.tp_rank
            if gate.dim() != 2 or gate.shape[0] % size or down.shape != gate.T.shape:
                return None
            return gate.chunk(size)[rank], up.chunk(size)[rank], down.chunk(size, dim=1)[rank]
    return None


def _compare(
    value: torch.Tensor,
    experts: Sequence[torch.Tensor],
    begin: int,
    height: int,
    order: torch.Tensor | None,
    most: int,
    rng: random.Random,
) -> bool | None:
    """Compare rows of every expert at once: from a GPU each copy makes the host wait.

    Args:
        value: [experts, rows, columns] of the layer; kernels pad each of the expected tensors.
        experts: for each, the rows that it should have from ``begin`` on, at most ``height``.
        order: of `_order_of_kept`.

    Returns:
        None if they differ; else whether the rows are of more than one number.
    """
    count, columns = experts[0].shape
    if count > height or columns > value.shape[2]:
        return None
    if any(tensor.shape != experts[0].shape for tensor in experts):
        return None
    places = [sampled_rows(count, rng, most) for _ in experts]
    rows = [tensor[at] for tensor, at in zip(experts, places, strict=True)]
    staged = torch.cat(rows).to(value.dtype)
    numbers = torch.arange(len(experts)).repeat_interleave(len(places[0]))
    at = torch.cat(places) + begin
    if order is None:
        found = value[numbers.to(value.device), at.to(value.device)][:, :columns].cpu()
    else:
        packed = order.view(value.shape[1:])[at, :columns].long()
        found = value.flatten(1)[numbers[:, None], packed]
    return tells_layout(staged) if same_bytes(found, staged) else None


def _order_of_kept(layer: Any, value: torch.Tensor) -> torch.Tensor | None:
    """Places of an expert's numbers in the layer's packed copy; None: there is no packed copy."""
    kernel = layer.quant_method.moe_kernel
    experts = None if kernel is None else kernel.fused_experts
    if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
        return None
    return _packed_order(tuple(value.shape[1:]), value.dtype, experts.isa)


@lru_cache(maxsize=4)
def _packed_order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> torch.Tensor | None:
    """int32 [rows * columns]: where vLLM's packing puts each number. Found by packing places.

    None if packing does more than to move numbers.
    """
    places = torch.arange(shape[0] * shape[1])
    found = torch.zeros_like(places)
    for digit in range(_DIGITS):
        part = places // _DIGIT**digit % _DIGIT
        packed = cpu_prepack_moe_weight(part.to(dtype).view(1, *shape), isa)
        found += packed.reshape(-1).long() * _DIGIT**digit
    if found.min() < 0 or found.max() >= len(places):
        return None
    order = torch.full((len(places),), -1, dtype=torch.int32)
    order[found] = places.int()
    return order if order.min() >= 0 else None
