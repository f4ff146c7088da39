"""The small files beside the shards, from which verl's merger makes a Hugging Face model."""

import copy
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from trainsync.checkpoint import state_names
from trainsync.checkpoint.merge.lora import TRAIN_META
from trainsync.checkpoint.merge.output import say_dtype
from trainsync.engines.fsdp.state import fsdp_version, unwrapped
from trainsync.engines.hf.export import base_model
from trainsync.engines.lora import adapters

logger = logging.getLogger(__name__)

FOLDER = "huggingface"


@dataclass(frozen=True)
class HFModel:
    """A model with the files that ``huggingface/`` gets beside the shards."""

    hf_config: Any
    processing_class: Any = None

    def __post_init__(self) -> None:
        given = self.processing_class
        if given is not None and not hasattr(given, "save_pretrained"):
            raise TypeError(
                f"processing_class is a {type(given).__name__}; expected a tokenizer or processor "
                "of transformers, which has save_pretrained"
            )

    def get_processor(self) -> Any:
        """Tokenizer or processor, or None."""
        return self.processing_class


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
    ``processing_class`` saves, where they exist.

    Args:
        processing_class: tokenizer or processor, or None.
        merged: the adapter is merged into the weights of the shards.

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


def huggingface_files(model: torch.nn.Module, tokenizer: Any = None) -> dict[str, bytes]:
    """Files beside a checkpoint's shards that a merge into a Hugging Face folder needs (``trainsync
    checkpoints merge``), for ``attachments`` of `CheckpointCoordinator.save`::

        files = trainsync.huggingface_files(model, tokenizer)
        coordinator.save(step, model=model, optimizer=optimizer, attachments=files)

    Make the files once. Rank 0 writes them.

    Args:
        model: of transformers, also wrapped by ``fully_shard``, DistributedDataParallel or
            ``torch.compile``.
        tokenizer: tokenizer or processor, saved in the folder too.

    Returns:
        path relative to the folder of the shards → content.

    Raises:
        TypeError: the model has no configuration that can be saved.
    """
    module, _ = state_names.unwrapped(model)
    if not hasattr(getattr(base_model(module), "config", None), "save_pretrained"):
        raise TypeError(
            f"{type(module).__name__} has no config of transformers, so there is no Hugging Face "
            "folder to merge its checkpoints into; expected a PreTrainedModel"
        )
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return merger_files(module, torch.distributed.get_world_size() if ready else 1, tokenizer)


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
    # An export writes the weights in their own dtype; transformers loads them in this one.
    floating = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    say_dtype(folder / "config.json", floating)
    if auto_map:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=config)


def _generation_config(model: Any, config: Any) -> Any:
    """The generation configuration of the model's origin, as verl saves it; else the model's
    own."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return None
    return origin_generation_config(config) or getattr(model, "generation_config", None)


def origin_generation_config(config: Any) -> Any:
    """The generation configuration in the folder the model was loaded from; None without one."""
    origin = getattr(config, "name_or_path", None)
    if not origin:
        return None
    from transformers import GenerationConfig

    try:
        # Local files only: a save must not wait for the Hugging Face hub.
        return GenerationConfig.from_pretrained(origin, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - with any error, the model may carry one
        logger.info("no generation config at %s: %s", origin, error)
        return None


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=4) + "\n").encode()
