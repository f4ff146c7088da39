"""Read and restore one rank's optimizer state and extra state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainsync.checkpoint.errors import CheckpointError
from trainsync.engines.builtin_types import plain
from trainsync.engines.checkpoints.save_plan import EXTRA, MODEL, OPTIMIZER
from trainsync.engines.fsdp.state import model_state, settle, sharded, unwrapped
from trainsync.engines.lora import adapters

State = dict[str, Any]


@dataclass(frozen=True)
class TrainedParts:
    """A rank's model, optimizer and scheduler; without training the last two are None."""

    module: torch.nn.Module
    optimizer: Any
    scheduler: Any


def weights(module: torch.nn.Module, *, adapter_only: bool) -> State:
    """This rank's shards of the model, or of its LoRA adapter alone; they alias the parameters."""
    state = model_state(module)
    return adapters.adapter_state(state) if adapter_only else state


def has_adapter(module: torch.nn.Module) -> bool:
    """Whether the model has a LoRA adapter."""
    return adapters.peft_config(unwrapped(module)) is not None


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """This rank's optimizer state; tensors alias the optimizer's."""
    with sharded(module):
        state = optimizer.state_dict()
    settle(state)
    if "param_groups" in state:
        # Hyperparameters come from configuration files, in types of NumPy or OmegaConf.
        state = {**state, "param_groups": plain(state["param_groups"])}
    return state


def extra_state(scheduler: Any, rng: State) -> State:
    """Scheduler and random generators, under the names that verl's loader reads."""
    return {
        "lr_scheduler": None if scheduler is None else plain(scheduler.state_dict()),
        "rng": plain(rng),
    }


def load(
    trained: TrainedParts,
    parts: dict[str, State],
    complete: Callable[[State], State],
    load_rng: Callable[[State], None],
) -> None:
    """Load this rank's saved `MODEL`, `OPTIMIZER` and `EXTRA`, those that were saved.

    Args:
        complete: turns the saved optimizer state into a state that the optimizer accepts.
        load_rng: sets the random generators.

    Raises:
        CheckpointError: the weights are an adapter's and the model has no adapter.
        RuntimeError, ValueError: raised by torch; names the tensors that do not fit.
    """
    with sharded(trained.module):
        if MODEL in parts:
            _load_weights(trained.module, parts[MODEL])
        if OPTIMIZER in parts:
            trained.optimizer.load_state_dict(complete(parts[OPTIMIZER]))
    if EXTRA in parts:
        extra = parts[EXTRA]
        if "rng" in extra:
            load_rng(extra["rng"])
        if extra["lr_scheduler"] is not None and trained.scheduler is not None:
            trained.scheduler.load_state_dict(extra["lr_scheduler"])


def _load_weights(module: torch.nn.Module, state: State) -> None:
    # A checkpoint of the adapter alone leaves the base model unchanged.
    adapter_only = bool(state) and all(adapters.is_adapter(name) for name in state)
    result = module.load_state_dict(state, strict=not adapter_only)
    if result is not None and result.unexpected_keys:
        raise CheckpointError(
            f"the checkpoint holds an adapter's weights alone, and the model has no "
            f"{', '.join(result.unexpected_keys[:3])}; expected the same LoRA configuration"
        )
