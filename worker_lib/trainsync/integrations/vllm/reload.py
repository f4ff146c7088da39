"""vLLM's layerwise reload, with the steps that vLLM 0.32 lacks on a CPU.

On a CPU layers compute with packed copies of their weights. Two kinds of layers would stay packed
from the version before, or be read as packed and not be so, and one kind would read scales in
memory that was let go of: tests/vllm shows all three.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

_HELD: Final = "trainsync_scales"


@contextmanager
def reloading(model: torch.nn.Module, model_config: Any, *, tied: bool) -> Iterator[None]:
    """In the block, ``model.load_weights`` replaces the weights and all that is derived from them.

    Also after an error the model keeps its memory: layers that were loaded by then have
    their new weights.

    Args:
        tied: whether the head's weights are those of the embedding.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    kernels = _forget_expert_kernels(model) if on_cpu else []
    if on_cpu:
        _hold_scales(model)
    initialize_layerwise_reload(model)
    try:
        yield
    finally:
        finalize_layerwise_reload(model, model_config)
        for method, kernel in kernels:
            if method.moe_kernel is None:  # its layer was not loaded
                method.moe_kernel = kernel
        if tied and on_cpu:
            _refresh_heads(model)


def _forget_expert_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Let mixtures of experts pack their weights again: they pack as they make their kernel."""
    found = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            found.append((method, method.moe_kernel))
            method.moe_kernel = None
    return found


def _hold_scales(model: torch.nn.Module) -> None:
    """Keep the scales of int8 layers where their product, of oneDNN, reads them.

    The product is made of new scales, which vLLM then copies to the place of the first ones, and
    lets go of.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
        if isinstance(kernel, CPUInt8ScaledMMLinearKernel) and not hasattr(kernel, _HELD):
            setattr(kernel, _HELD, None)
            process = partial(_process_and_hold, kernel, kernel.process_weights_for_onednn)
            kernel.process_weights_for_onednn = process


def _process_and_hold(kernel: Any, process: Callable[[Any], None], layer: Any) -> None:
    process(layer)
    _, scale, *_ = kernel.layer_param_names
    setattr(kernel, _HELD, getattr(layer, scale))


def _refresh_heads(model: torch.nn.Module) -> None:
    """Let heads pack their weights again, which came under the embedding's name."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
