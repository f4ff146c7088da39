"""Rows of the experts of a mixture as a worker of vLLM has them, beside those of a checkpoint."""

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from trainsync.weights.proof.products import same_bytes, sampled_rows

_NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Of an expert's tensors in a checkpoint: two that are fused by rows, and one."""
_ROWS: Final = 1024  # of all experts of a layer
_DIGIT: Final = 256  # every dtype of weights holds smaller whole numbers
_DIGITS: Final = 4


def right_experts(
    name: str, layer: RoutedExperts, tensors: Mapping[str, torch.Tensor], rng: random.Random
) -> set[str]:
    """The parameters of a layer of experts that have the weights of a checkpoint.

    Args:
        name: of the layer, such as ``model.layers.0.mlp.experts.routed_experts``.
    """
    right: set[str] = set()
    if layer.expert_map is not None:  # this worker has some of the experts, under other numbers
        return right
    parent = name.rpartition(".")[0]
    experts = range(layer.w13_weight.shape[0])
    most = max(1, _ROWS // len(experts))
    expected = [_expected(f"{parent}.{number}", layer, tensors) for number in experts]
    for parameter, part in (("w13_weight", 0), ("w2_weight", 1)):
        value: torch.Tensor = getattr(layer, parameter)
        order = _order_of_kept(layer, value)
        if all(
            found is not None and _is_right(value[number], found[part], order, most, rng)
            for number, found in zip(experts, expected, strict=True)
        ):
            right.add(f"{name}.{parameter}")
    return right


def _expected(
    prefix: str, layer: Any, tensors: Mapping[str, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] | None:
    """((gate, up), (down,)): [rows, columns] of this tensor parallel rank."""
    for names in _NAMES:
        gate, up, down = (tensors.get(f"{prefix}.{name}.weight") for name in names)
        if gate is not None and up is not None and down is not None:
            size, rank = layer.moe_config.tp_size, layer.moe_config.tp_rank
            rows = (gate.chunk(size)[rank], up.chunk(size)[rank])
            return rows, (down.chunk(size, dim=1)[rank],)
    return None


def _is_right(
    kept: torch.Tensor,
    expected: tuple[torch.Tensor, ...],
    order: torch.Tensor | None,
    most: int,
    rng: random.Random,
) -> bool:
    """Whether rows of an expert are as expected.

    Args:
        kept: [rows, columns] of the layer; kernels pad each of the expected tensors.
        order: of `_order_of_kept`.
    """
    height = kept.shape[0] // len(expected)
    for part, tensor in enumerate(expected):
        if tensor.shape[0] > height or tensor.shape[1] > kept.shape[1]:
            return False
        places = sampled_rows(tensor.shape[0], rng, most)
        rows = places + part * height
        if order is None:
            found = kept[rows.to(kept.device), : tensor.shape[1]].cpu()
        else:
            at = order.view(kept.shape)[rows, : tensor.shape[1]].long()
            found = kept.reshape(-1)[at]
        if not same_bytes(found, tensor[places].to(found.dtype)):
            return False
    return True


def _order_of_kept(layer: Any, value: torch.Tensor) -> torch.Tensor | None:
    """Places of an expert's numbers in the layer's packed copy; None: it is not packed."""
    kernel = layer.quant_method.moe_kernel
    experts = None if kernel is None else kernel.fused_experts
    if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
        return None
    return _packed_order(tuple(value.shape[1:]), value.dtype, experts.isa)


@lru_cache(maxsize=4)
def _packed_order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> torch.Tensor | None:
    """int32 [rows * columns]: where vLLM's packing puts each number. Found by packing places.

    None if it does more than to move numbers.
    """
    places = torch.arange(shape[0] * shape[1])
    found = torch.zeros_like(places)
    for digit in range(_DIGITS):
        part = places // _DIGIT**digit % _DIGIT
        packed = cpu_prepack_moe_weight(part.to(dtype).view(1, *shape), isa)
        found += packed.reshape(-1).long() * _DIGIT**digit
    if not torch.equal(found.sort().values, places):
        return None
    order = torch.empty(len(places), dtype=torch.int32)
    order[found] = places.int()
    return order
