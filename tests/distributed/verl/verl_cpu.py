"""verl's real FSDP engine on a CPU, with a tiny Qwen2, and the patches to run without a GPU.

Import this only in a rank: the import takes seconds and patches verl in the whole process.
"""

from importlib.util import find_spec
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from trainsync.engines.fsdp.state import model_state

if find_spec("verl.plugin") is not None:
    # verl 0.9 supports only accelerators; 0.8 also runs on a machine without one.
    from verl.plugin.platform import set_platform
    from verl_grpo.cpu_platform import CPUPlatform

    set_platform(CPUPlatform())  # before the import of the engine, which reads the platform once

import torch.distributed.fsdp._init_utils as fsdp_init
import verl.utils.model as verl_model
import verl.workers.engine.fsdp.transformer_impl as fsdp_engine
from verl.utils import fsdp_utils

from tests.distributed.verl.verl_made import make_engine, make_model, train

__all__ = ["fingerprint", "make_engine", "make_model", "train", "weights_fingerprint", "whole"]

# FSDP1 uses three functions that a CPU lacks.
torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
fsdp_init._check_module_states_for_sync_module_states = lambda *args, **kwargs: None
fsdp_engine.load_fsdp_model_to_gpu = fsdp_utils.load_fsdp_model_to_gpu = lambda module: None


def _load_value_head(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> Any:
    """Replaces verl's function, which uses flash attention and so needs a GPU."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
    )


verl_model.load_valuehead_model = _load_value_head


def fingerprint(engine: Any) -> str:
    """Fingerprint of all state that a checkpoint restores on this rank, bit for bit."""
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    hasher = xxhash.xxh3_128()
    for state in (
        model_state(engine.module),
        engine.optimizer.state_dict(),
        engine.lr_scheduler.state_dict(),
        BaseCheckpointManager.get_rng_state(),
    ):
        _digest(state, hasher)
    return str(hasher.hexdigest())


def weights_fingerprint(engine: Any) -> str:
    """Fingerprint of this rank's shards of the model alone."""
    hasher = xxhash.xxh3_128()
    _digest(model_state(engine.module), hasher)
    return str(hasher.hexdigest())


def whole(engine: Any) -> dict[str, str]:
    """Name → fingerprint of each weight, with its moments, in full; all ranks call it together."""
    found = {}
    parameters = dict(engine.module.named_parameters())
    for name, parameter in parameters.items():
        hasher = xxhash.xxh3_128()
        state = engine.optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            _digest(full, hasher)
        found[name] = hasher.hexdigest()
    return found


def _digest(value: Any, hasher: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            hasher.update(str(key).encode())
            _digest(value[key], hasher)
    elif isinstance(value, list | tuple):
        for item in value:
            _digest(item, hasher)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        hasher.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    else:
        hasher.update(repr(value).encode())
