"""Save and upload the weights of FSDP2 modules.

``engine`` is verl's FSDPEngine, or anything whose ``module`` is the module that was given to
``fully_shard``.
"""

import logging
import weakref
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.hf_config import merger_files
from trainsync.engines.paths import subdirectory
from trainsync.weights.upload import Uploaded, Uploader


class Engine(Protocol):
    """What is needed of a training engine."""

    @property
    def module(self) -> torch.nn.Module:
        """The sharded model."""
        ...


# One for each module, for the memory that it reuses.
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
    ``fsdp_config.json`` and the Hugging Face configuration, which verl's merger needs.

    Args:
        local_path: ``<run directory>/global_step_N/actor``, or ``actor``.

    Raises:
        What `CheckpointCoordinator.save_async` raises.
    """
    module = engine.module
    coordinator.save_async(
        "model",
        module.state_dict(),
        global_step,
        is_state_dict=True,
        subdir=subdirectory(local_path, coordinator.directory, global_step),
        attachments=merger_files(module, coordinator.world_size) if coordinator.rank == 0 else {},
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
    module = engine.module
    uploader = _UPLOADERS.get(module)
    if uploader is None:
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if ready else 0
        world_size = torch.distributed.get_world_size() if ready else 1
        uploader = _UPLOADERS[module] = Uploader(rank, world_size)
    uploaded = uploader.upload(module.state_dict(), synchronizer, global_step, timeout)
    logger.info(
        "version %d: %d bytes uploaded in %.3f s%s",
        uploaded.version,
        uploaded.bytes,
        uploaded.seconds,
        ", published" if uploaded.published else "",
    )
    return uploaded
