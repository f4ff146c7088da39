"""vLLM's layerwise reload, and what vLLM 0.32 forgets of it on a CPU.

On a CPU layers compute with packed copies of their weights. Two kinds of them would stay packed
from the version before, or be read as packed and not be so: tests/vllm shows both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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


@contextmanager
def reloading(model: torch.nn.Module, model_config: Any, *, tied: bool) -> Iterator[None]:
    """In the block, ``model.load_weights`` replaces the weights and all that is derived from them.

    Also after an error the model's memory is what it was: layers that were loaded by then have
    their new weights.

    Args:
        tied: whether the head's weights are those of the embedding.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    kernels = _forget_expert_kernels(model) if on_cpu else []
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
    """Let mixtures of experts pack their weights again: they do it as they make their kernel."""
    found = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            found.append((method, method.moe_kernel))
            method.moe_kernel = None
    return found


def _refresh_heads(model: torch.nn.Module) -> None:
    """Let heads pack their weights again, which came under the embedding's name."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
