"""Save and upload the weights of FSDP modules.

``engine`` is verl's FSDPEngine (FSDP1 or FSDP2, with or without LoRA), or anything whose ``module``
is the sharded module.
"""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.fsdp_state import fsdp_version, model_state
from trainsync.engines.hf_config import merger_files
from trainsync.engines.paths import subdirectory
from trainsync.weights.upload import Uploaded, Uploader


class Engine(Protocol):
    """What is needed of a training engine."""

    @property
    def module(self) -> torch.nn.Module:
        """The sharded model."""
        ...


@dataclass(frozen=True)
class EngineOf:
    """A module where an engine is expected."""

    module: torch.nn.Module


# What is made once for each module.
_FILES: "weakref.WeakKeyDictionary[torch.nn.Module, dict[str, bytes]]" = weakref.WeakKeyDictionary()
_UPLOADERS: "weakref.WeakKeyDictionary[torch.nn.Module, Uploader]" = weakref.WeakKeyDictionary()


def fsdp_save_state_dict(
    engine: Engine,
    local_path: str | Path,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
) -> None:
    """Save this rank's shards of the model as component ``model`` of the step's state dict.

    Returns when the parameters may change; a background thread writes
    ``<local_path>/model_world_size_W_rank_R.pt``, as verl names and loads it. Rank 0 also writes
    what verl's merger needs: ``fsdp_config.json`` and, in ``huggingface/``, configurations and the
    tokenizer or processor of verl's engine. With LoRA the weights are verl's too: the base model's
    and the adapter's apart.

    Every rank calls it; with FSDP1 it is a collective.

    Args:
        local_path: ``<run directory>/global_step_N/actor``, or ``actor``.

    Raises:
        What `CheckpointCoordinator.save_async` raises.
    """
    module = _module(engine)
    with _resident(engine):
        coordinator.save_async(
            "model",
            model_state(module),
            global_step,
            is_state_dict=True,
            subdir=subdirectory(local_path, coordinator.directory, global_step),
            attachments=_files(engine, coordinator.world_size) if coordinator.rank == 0 else {},
        )
    logger.info(
        "step %d: state dict of rank %d staged in %.3f s",
        global_step,
        coordinator.rank,
        coordinator.stats.last_blocked_seconds,
    )


def fsdp_upload_state_dict(
    engine: Engine,
    synchronizer: Any,
    global_step: int,
    logger: logging.Logger,
    *,
    timeout: float = 600.0,
) -> Uploaded:
    """Upload this rank's shards of the model as its part of version ``global_step``.

    Every rank of the default process group calls it; there is no gather. The version is published
    when all parts are there.

    Raises:
        What `Uploader.upload` raises.
    """
    module = _module(engine)
    uploader = _UPLOADERS.get(module)
    if uploader is None:
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if ready else 0
        world_size = torch.distributed.get_world_size() if ready else 1
        uploader = _UPLOADERS[module] = Uploader(rank, world_size)
    with _resident(engine):
        uploaded = uploader.upload(model_state(module), synchronizer, global_step, timeout)
    logger.info(
        "version %d: %d bytes uploaded in %.3f s%s",
        uploaded.version,
        uploaded.bytes,
        uploaded.seconds,
        ", published" if uploaded.published else "",
    )
    return uploaded


def _module(engine: Engine) -> torch.nn.Module:
    module = getattr(engine, "module", None)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"{type(engine).__name__} has no attribute 'module'; expected an FSDPEngine of verl "
            "0.8 or 0.9 after initialize(), or anything with the sharded module under that name"
        )
    return module


def _files(engine: Engine, world_size: int) -> dict[str, bytes]:
    files = _FILES.get(engine.module)
    if files is None:
        config: Any = getattr(engine, "model_config", None)
        processing = config.get_processor() if hasattr(config, "get_processor") else None
        files = _FILES[engine.module] = merger_files(engine.module, world_size, processing)
    return files


@contextmanager
def _resident(engine: Engine) -> Iterator[None]:
    """Within it, an FSDP1 module that verl offloads is on its device: its shards need gathering."""
    module = engine.module
    if fsdp_version(module) != 1 or not getattr(engine, "_is_offload_param", False):
        yield
        return
    # Untyped: they take either FSDP, whatever they say.
    from verl.utils import fsdp_utils

    fsdp_utils.load_fsdp_model_to_gpu(module)  # type: ignore[arg-type]
    try:
        yield
    finally:
        fsdp_utils.offload_fsdp_model_to_cpu(module)  # type: ignore[arg-type]
