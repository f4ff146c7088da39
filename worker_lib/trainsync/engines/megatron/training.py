"""A rank's training state beside its weights: optimizer, schedule and random number generators.

Component ``optim`` holds the optimizer's boxes (see `trainsync.engines.megatron.optimizer`), its
parameter groups, its gradient scaler and the schedule; ``extra_state`` holds the generators.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from trainsync.checkpoint.megatron_shards import FORMAT, pack
from trainsync.checkpoint.training_state import rng_state
from trainsync.engines.megatron.optimizer import distributed_optimizers, own_boxes, pieces

GROUPS, SCALER, SCHEDULE, RNG, TRACKER = "groups", "scaler", "schedule", "rng", "tracker"

_STEP: Final = "step"
Group = dict[str, Any]


def can_stage(optimizer: Any) -> bool:
    """Whether `optimizer_state` supports the optimizer's sharding."""
    return distributed_optimizers(optimizer) is not None


def optimizer_state(
    optimizer: Any, schedule: Any, chunks: Sequence[torch.nn.Module], layout: Mapping[str, int]
) -> dict[str, Any]:
    """Content of this rank's shard file of ``optim``; tensors alias the live ones.

    Args:
        optimizer: one that `can_stage`.
        schedule: Megatron's OptimizerParamScheduler; None without one.
        chunks: a model for each virtual pipeline stage, without wrappers, on their device.
        layout: see `pack`.

    Raises:
        UnsupportedStateError: a trained weight is not in the model's sharded state.
    """
    optimizers = distributed_optimizers(optimizer) or []
    scaler = next((part.grad_scaler for part in optimizers if part.grad_scaler), None)
    beside = {
        GROUPS: [group for part in optimizers for group in _groups(part)],
        SCALER: None if scaler is None else scaler.state_dict(),
        SCHEDULE: None if schedule is None else schedule.state_dict(),
    }
    return pack(own_boxes(pieces(optimizers, chunks)), layout, beside)


def can_stage_random_numbers() -> bool:
    """Whether Megatron returns its generators as tensors; with CUDA graphs it does not."""
    return all(isinstance(state, torch.Tensor) for state in _tracked().values())


def random_state(layout: Mapping[str, int]) -> dict[str, Any]:
    """Content of this rank's shard file of ``extra_state``; see `can_stage_random_numbers`."""
    return {"format": FORMAT, "layout": dict(layout), RNG: rng_state(), TRACKER: _tracked()}


def identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Megatron's key of a parameter group, equal in every parallel layout."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys as keys

    # NeMo prefixes some keys with pre_.
    return tuple(group[key] if key in group else group.get(f"pre_{key}") for key in keys)


def counts_for_each_weight(optimizer: Any) -> bool:
    """Whether the inner optimizer counts steps in each weight's state, as torch's optimizers do;
    Transformer Engine counts in the group."""
    return isinstance(optimizer.optimizer, torch.optim.Adam)  # AdamW is a subclass


def _groups(optimizer: Any) -> list[Group]:
    found = []
    for group in optimizer.optimizer.param_groups:
        saved = {name: value for name, value in group.items() if name != "params"}
        if counts_for_each_weight(optimizer):
            states = (optimizer.optimizer.state.get(weight) for weight in group["params"])
            steps = {float(state[_STEP]) for state in states if state}
            saved[_STEP] = steps.pop() if len(steps) == 1 else None
        found.append(saved)
    return found


def _tracked() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return dict(get_cuda_rng_tracker().get_states())
