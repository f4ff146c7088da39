"""Save whole checkpoints of Megatron models: weights, optimizer, schedule and random numbers."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.engines.checkpoints.save_plan import EXTRA, MODEL, OPTIMIZER
from trainsync.engines.megatron.layout import ParallelLayout
from trainsync.engines.megatron.state_dicts import (
    described,
    require_megatron,
    save_state,
    save_weights,
)
from trainsync.engines.megatron.training import (
    can_stage,
    can_stage_random_numbers,
    optimizer_state,
    random_state,
)
from trainsync.engines.protocol import TrainingEngine
from trainsync.engines.publish.state_dicts import log_saved
from trainsync.engines.verl.adapters import chunks


def megatron_save_checkpoint(
    engine: Any,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
    *,
    subdir: str = "actor",
    attachments: Mapping[str, bytes] | None = None,
) -> bool:
    """Save a checkpoint of a Megatron model, on a volume or in a bucket: the mirror of
    `megatron_load_checkpoint`.

    Every rank calls it alike; rank 0 registers all. Returns when tensors may change, and writes in
    the background. Saves components ``model``, ``optim`` (with an optimizer; the schedule is in it)
    and ``extra_state`` (random numbers), which any parallel layout loads.

    Args:
        engine: a `TrainedMegatron` with the ``optimizer`` and ``lr_scheduler`` that train it; or
            verl's MegatronEngine.
        subdir: folder inside ``global_step_N``.
        attachments: small files beside rank 0's weights, such as
            `trainsync.data_cursor_file`.

    Returns:
        False when the save is skipped (see `CheckpointCoordinator`).

    Raises:
        TypeError: the engine has a LoRA adapter of Megatron-Bridge, or is of Megatron-FSDP.
        UnsupportedStateError: the optimizer is not Megatron's distributed one, or random numbers
            are kept in CUDA graphs; nothing was saved.
        What `CheckpointCoordinator.save_async` raises.
    """
    coordinator.check_open(f"save of step {global_step}")
    trained: Any = require_megatron(engine)
    if getattr(trained, "writes_for_itself", False):
        raise TypeError(
            f"{type(engine).__name__} has a LoRA adapter of Megatron-Bridge, or is sharded by "
            "Megatron-FSDP; expected neither: not all of their weights are in sharded_state_dict"
        )
    names = [MODEL, *_training_parts(trained)]
    layout = ParallelLayout()
    if coordinator.rank == 0:
        parts = [f"{coordinator.component_prefix}{name}" for name in names]
        everyone = all_ranks(*parts, world_size=coordinator.world_size)
        # Training does not wait for the answer: the next call raises what is refused.
        coordinator.register(global_step, checkpoint_participants=everyone, patience=0)
    taken = save_weights(
        trained,
        subdir,
        global_step,
        coordinator,
        layout,
        is_state_dict=False,
        attachments=attachments,
    ) and save_training(trained, names, subdir, global_step, coordinator)
    if taken:
        log_saved(logger, coordinator, global_step, "staged", layout.coordinates)
    return taken


def save_training(
    engine: Any,
    components: Collection[str],
    subdir: str,
    step: int,
    coordinator: CheckpointCoordinator,
) -> bool:
    """Stage those of ``optim`` and ``extra_state`` that ``components`` names.

    Args:
        engine: a `TrainingEngine`; for ``optim`` with ``optimizer``, and perhaps ``lr_scheduler``.

    Returns:
        whether the coordinator took all of them.

    Raises:
        UnsupportedStateError: a trained weight is not in the model's sharded state.
        What `CheckpointCoordinator.save_async` raises.
    """
    taken, layout = True, ParallelLayout()
    about = described(layout)
    if OPTIMIZER in components:
        with engine.resident():
            models, schedule = chunks(engine.module), getattr(engine, "lr_scheduler", None)
            state = optimizer_state(engine.optimizer, schedule, models, about)
            taken &= save_state(OPTIMIZER, state, subdir, step, coordinator, layout)
    if EXTRA in components:
        state = random_state(about)
        taken &= save_state(EXTRA, state, subdir, step, coordinator, layout)
    return taken


def _training_parts(trained: TrainingEngine) -> list[str]:
    """The components beside the weights. Raises `UnsupportedStateError`."""
    optimizer = getattr(trained, "optimizer", None)
    if optimizer is not None and not can_stage(optimizer):
        raise UnsupportedStateError(
            f"the optimizer is a {type(optimizer).__name__} that is not distributed; expected "
            "use_distributed_optimizer, on the device"
        )
    if not can_stage_random_numbers():
        raise UnsupportedStateError(
            "Megatron keeps its random numbers in CUDA graphs; expected states that are tensors"
        )
    return [EXTRA] if optimizer is None else [OPTIMIZER, EXTRA]
