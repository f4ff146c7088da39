"""verl's extension of vLLM's worker, on a CPU.

vLLM takes this by ``actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls``.
"""

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils


def _compute_with_the_weight(layer: Any, remove_weight: bool) -> None:
    """Without packing: vLLM drops what it packed, and verl then has nothing to load into."""
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _compute_with_the_weight


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's own; that vLLM imports it here is what counts."""
