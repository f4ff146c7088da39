"""LoRA in verl's format: adapters among the model's weights, and a file with rank and alpha."""

from collections.abc import Mapping
from typing import Any

import torch

from trainsync.checkpoint.errors import CheckpointError

_ADAPTER = "default"


def peft_config(model: torch.nn.Module) -> Any:
    """The adapter's configuration in a PEFT model; None for any other model."""
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return None
    if isinstance(configs, Mapping):
        return configs.get(_ADAPTER) or next(iter(configs.values()))
    return configs


def train_meta(model: torch.nn.Module) -> dict[str, Any] | None:
    """The adapter's settings that verl's merger reads; None without an adapter."""
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
    # verl's merger ignores these settings; `trainsync.checkpoint.merge.lora` reads them.
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
    """A PEFT model's weights as (base model's, adapter's), under their names outside of PEFT."""
    base, adapter = {}, {}
    for name, tensor in state.items():
        if is_adapter(name):
            adapter[name.replace(f".{_ADAPTER}.", ".")] = tensor
        else:
            base[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = tensor
    return base, adapter
