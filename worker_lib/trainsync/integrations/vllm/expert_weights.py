"""The weights of a mixture's expert as a worker of vLLM has them."""

import random
from collections.abc import Mapping
from typing import Any, Final

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

_NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Of an expert's tensors in a checkpoint: two that are fused by rows, and one."""
_LOOKED_AT: Final = 2  # experts of a layer: others with each version


def expert_weights_are_right(
    name: str, layer: RoutedExperts, tensors: Mapping[str, torch.Tensor], rng: random.Random
) -> dict[str, bool]:
    """Whether some of a layer's experts have the weights of a checkpoint, by parameter.

    Args:
        name: of the layer, such as ``model.layers.0.mlp.experts.routed_experts``.
    """
    right = {"w13_weight": False, "w2_weight": False}
    if layer.expert_map is not None:  # this worker has some of the experts, under other numbers
        return right
    parent = name.rpartition(".")[0]
    count = layer.w13_weight.shape[0]
    chosen = sorted(rng.sample(range(count), min(count, _LOOKED_AT)))
    expected = [_expected(f"{parent}.{number}", layer, tensors) for number in chosen]
    for parameter, part in zip(right, (0, 1), strict=True):
        value: torch.Tensor = getattr(layer, parameter)
        right[parameter] = all(
            one is not None and _same(value[number], _as_kept(one[part], value, layer, part))
            for number, one in zip(chosen, expected, strict=True)
        )
    return right


def _expected(
    prefix: str, layer: Any, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """([gate and up, hidden], [hidden, intermediate]) of this tensor parallel rank."""
    for names in _NAMES:
        gate, up, down = (tensors.get(f"{prefix}.{name}.weight") for name in names)
        if gate is None or up is None or down is None:
            continue
        size, rank = layer.moe_config.tp_size, layer.moe_config.tp_rank
        fused = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
        return fused, down.chunk(size, dim=1)[rank]
    return None


def _as_kept(tensor: torch.Tensor, value: torch.Tensor, layer: Any, part: int) -> torch.Tensor:
    """An expert's weight in the layout of the layer's kernel."""
    tensor = tensor.to(value.dtype)
    kernel = layer.quant_method.moe_kernel
    experts = None if kernel is None else kernel.fused_experts
    if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
        return tensor.to(value.device)
    missing = value[0].numel() // layer.hidden_size // (1 if part else 2)
    missing -= tensor.shape[1] if part else tensor.shape[0] // 2
    if part:
        tensor = torch.nn.functional.pad(tensor, (0, missing))
    else:
        halves = (torch.nn.functional.pad(h, (0, 0, 0, missing)) for h in tensor.chunk(2))
        tensor = torch.cat(list(halves))
    packed: torch.Tensor = cpu_prepack_moe_weight(tensor[None].contiguous(), experts.isa)
    return packed[0]


def _same(has: torch.Tensor, wanted: torch.Tensor) -> bool:
    if has.shape != wanted.shape:
        return False
    return torch.equal(has.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
