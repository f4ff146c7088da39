"""The small files with which verl's merger turns shards into a Hugging Face model."""

import copy
import json
from typing import Any

import torch


def merger_files(module: torch.nn.Module, world_size: int) -> dict[str, bytes]:
    """``fsdp_config.json``, and ``huggingface/`` configurations where the module has them.

    Returns:
        path relative to the folder of the shards → content.
    """
    files = {"fsdp_config.json": _json({"FSDP_version": 2, "world_size": world_size})}
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        if not getattr(config, "architectures", None):
            # FSDP2 puts its own class before the model's.
            config.architectures = [type(module).__name__.removeprefix("FSDP")]
        files["huggingface/config.json"] = config.to_json_string().encode()
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["huggingface/generation_config.json"] = generation.to_json_string().encode()
    return files


def _json(value: dict[str, int]) -> bytes:
    return (json.dumps(value, indent=4) + "\n").encode()
