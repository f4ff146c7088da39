"""Let the engines of verl save and load through a run."""

import logging
from typing import Any

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.fsdp.checkpoint_manager import FSDPCheckpointManager
from trainsync.engines.megatron.checkpoints import MegatronCheckpoints
from trainsync.runtime.context import RunContext

logger = logging.getLogger(__name__)

SUPPORTED = "verl 0.8 and 0.9"
_NEEDED = ("module", "optimizer", "lr_scheduler", "checkpoint_config", "checkpoint_manager")


def install_checkpoint_manager(
    engine: Any,
    context: RunContext,
    synchronizer: Any = None,
    coordinator: CheckpointCoordinator | None = None,
) -> FSDPCheckpointManager:
    """Let ``engine.save_checkpoint`` and ``engine.load_checkpoint`` go through the run.

    Args:
        engine: verl's FSDPEngine after ``initialize``; on a worker it is ``worker.actor.engine``.
        context: the run; every rank has its own.
        synchronizer: see `FSDPCheckpointManager`.
        coordinator: of this rank, when ``context.coordinator()`` is not what is wanted.

    Returns:
        the manager, which now is ``engine.checkpoint_manager``.

    Raises:
        TypeError: the engine lacks what such an engine has.
    """
    for name in _NEEDED:
        if not hasattr(engine, name):
            raise TypeError(
                f"{type(engine).__name__} has no attribute {name!r}; expected an initialised "
                f"FSDPEngine of {SUPPORTED}"
            )
    theirs = engine.checkpoint_manager
    manager = FSDPCheckpointManager(
        engine.module,
        engine.optimizer,
        engine.lr_scheduler,
        theirs.processing_class,
        engine.checkpoint_config,
        trust_remote_code=theirs.trust_remote_code,
        coordinator=coordinator or context.coordinator(),
        synchronizer=synchronizer,
        sync_method=context.sync.method,
        max_to_keep=context.checkpoint.max_to_keep,
    )
    _warn_of_verls_pointer(engine, manager.rank)
    engine.checkpoint_manager = manager
    return manager


def install_megatron_checkpoints(
    engine: Any, context: RunContext, coordinator: CheckpointCoordinator | None = None
) -> MegatronCheckpoints:
    """As `install_checkpoint_manager`, for verl's MegatronEngine, whose own manager stays: it
    writes the parts that are not weights.

    Returns:
        what ``engine.save_checkpoint`` and ``engine.load_checkpoint`` now go to.

    Raises:
        TypeError: see `MegatronCheckpoints`.
    """
    saves = MegatronCheckpoints(
        engine, coordinator or context.coordinator(), context.checkpoint.max_to_keep
    )
    _warn_of_verls_pointer(engine, saves.rank)
    engine.save_checkpoint = saves.save_checkpoint
    engine.load_checkpoint = saves.load_checkpoint
    return saves


def _warn_of_verls_pointer(engine: Any, rank: int) -> None:
    config = engine.checkpoint_config
    if rank == 0 and not (config and config.get("async_save", False)):
        logger.warning(
            "verl's trainers write latest_checkpointed_iteration.txt themselves, before the save "
            "is committed: set checkpoint.async_save=True, which leaves it to the run's monitor"
        )
