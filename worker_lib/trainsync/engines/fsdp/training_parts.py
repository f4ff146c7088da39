"""The optimizer's and the remaining state of one rank, out of and into what it trains with."""

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
class Trained:
    """What a rank trains with; without training, ``optimizer`` and ``scheduler`` are None."""

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
        # Hyperparameters come out of configuration files, in their libraries' types.
        state = {**state, "param_groups": plain(state["param_groups"])}
    return state


def extra_state(scheduler: Any, rng: State) -> State:
    """Scheduler and random generators, under the names that verl's loader reads."""
    return {
        "lr_scheduler": None if scheduler is None else plain(scheduler.state_dict()),
        "rng": plain(rng),
    }


def load(
    trained: Trained,
    parts: dict[str, State],
    complete: Callable[[State], State],
    load_rng: Callable[[State], None],
) -> None:
    """Load what was saved of this rank: `MODEL`, `OPTIMIZER` and `EXTRA`, as far as they are there.

    Args:
        complete: makes a state that the optimizer takes out of the saved one.
        load_rng: sets the random generators.

    Raises:
        CheckpointError: an adapter's weights for a model without it.
        RuntimeError, ValueError: of torch, which names what does not fit.
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
    # An adapter alone leaves the base model as it is.
    adapter_only = bool(state) and all(adapters.is_adapter(name) for name in state)
    result = module.load_state_dict(state, strict=not adapter_only)
    if result is not None and result.unexpected_keys:
        raise CheckpointError(
            f"the checkpoint holds an adapter's weights alone, and the model has no "
            f"{', '.join(result.unexpected_keys[:3])}; expected the same LoRA configuration"
        )
