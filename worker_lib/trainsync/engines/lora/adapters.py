"""LoRA as verl keeps it: adapters among the model's weights, and a note of rank and alpha."""

from collections.abc import Mapping
from typing import Any

import torch

from trainsync.checkpoint.errors import CheckpointError

_ADAPTER = "default"


def peft_config(model: torch.nn.Module) -> Any:
    """Configuration of the adapter of a PEFT model; None for any other model."""
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return None
    if isinstance(configs, Mapping):
        return configs.get(_ADAPTER) or next(iter(configs.values()))
    return configs


def train_meta(model: torch.nn.Module) -> dict[str, Any] | None:
    """What verl's merger needs to know of the adapter; None without one."""
    config = peft_config(model)
    rank = int(getattr(config, "r", 0) or 0)
    if rank <= 0:
        return None
    task = getattr(config, "task_type", None) or "CAUSAL_LM"
    meta = {
        "r": rank,
        "lora_alpha": int(getattr(config, "lora_alpha", rank) or 0),
        "task_type": str(getattr(task, "value", task)),
    }
    # verl's merger does not know of these; `trainsync.checkpoint.merge.lora` does.
    others = {name: getattr(config, name, None) for name in ("use_rslora", "alpha_pattern")}
    return meta | {name: value for name, value in others.items() if value}


def is_adapter(name: str) -> bool:
    """Whether a weight of this name belongs to an adapter, by verl's rule."""
    return "lora_" in name or ".adapter_" in name


def adapter_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters' weights alone.

    Raises:
        CheckpointError: there are none.
    """
    found = {name: tensor for name, tensor in state.items() if is_adapter(name)}
    if not found:
        raise CheckpointError(
            f"save_lora_only is set and the model has a LoRA configuration, but none of its "
            f"{len(state)} weights belongs to an adapter"
        )
    return found


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights of a PEFT model as (the base model's, the adapter's), each under its usual names."""
    base, adapter = {}, {}
    for name, tensor in state.items():
        if is_adapter(name):
            adapter[name.replace(f".{_ADAPTER}.", ".")] = tensor
        else:
            base[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = tensor
    return base, adapter
