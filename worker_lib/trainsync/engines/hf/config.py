"""The small files that go with shards: with them verl's merger makes a Hugging Face model."""

import copy
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainsync.checkpoint.merge.output import say_dtype
from trainsync.checkpoint.merging_lora import TRAIN_META
from trainsync.engines.fsdp.state import fsdp_version, unwrapped
from trainsync.engines.hf.export import base_model
from trainsync.engines.lora import adapters

logger = logging.getLogger(__name__)

FOLDER = "huggingface"


def merger_files(
    module: torch.nn.Module,
    world_size: int,
    processing_class: Any = None,
    *,
    merged: bool = False,
) -> dict[str, bytes]:
    """``fsdp_config.json``, ``lora_train_meta.json`` with LoRA, and ``huggingface/…``.

    In ``huggingface/`` are the model's configuration (with the dtype of its weights), its
    generation configuration, its code when it is not one of transformers', and what
    ``processing_class`` saves, as far as there are any.

    Args:
        processing_class: tokenizer or processor, or None.
        merged: the shards have no adapter any more: it is in the weights.

    Returns:
        path relative to the folder of the shards → content.
    """
    files = {
        "fsdp_config.json": _json({"FSDP_version": fsdp_version(module), "world_size": world_size})
    }
    meta = adapters.train_meta(unwrapped(module))
    if meta is not None and not merged:
        files[TRAIN_META] = _json(meta)
    with tempfile.TemporaryDirectory(prefix="trainsync-hf-") as name:
        folder = Path(name)
        _save_configs(base_model(module), folder)
        if processing_class is not None:
            processing_class.save_pretrained(str(folder))
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files[f"{FOLDER}/{path.relative_to(folder)}"] = path.read_bytes()
    return files


def _save_configs(model: Any, folder: Path) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    if not getattr(config, "architectures", None):
        # FSDP2 puts its own class before the model's.
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
    auto_map = getattr(config, "auto_map", None)
    if auto_map:
        config.auto_map = {key: value for key, value in auto_map.items() if key is not None}
    generation = _generation_config(model, config)
    if generation is not None:
        generation.save_pretrained(str(folder))
    config.save_pretrained(str(folder))
    # An export's are written as they are, and transformers loads them as this says.
    floating = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    say_dtype(folder / "config.json", floating)
    if auto_map:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=config)


def _generation_config(model: Any, config: Any) -> Any:
    """That of the model's origin, which verl saves too; else the one that the model carries."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return None
    return origin_generation_config(config) or getattr(model, "generation_config", None)


def origin_generation_config(config: Any) -> Any:
    """The generation configuration beside what the model was made from; None without one."""
    origin = getattr(config, "name_or_path", None)
    if not origin:
        return None
    from transformers import GenerationConfig

    try:
        # Not over the network: a save must not wait for a hub.
        return GenerationConfig.from_pretrained(origin, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, the model may carry one
        logger.info("no generation config at %s: %s", origin, error)
        return None


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=4) + "\n").encode()
