"""The ways in which a trainer saves its state, each with the update that follows."""

import io
import os
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.shard_names import shard_file_name

FAILURE: Final = "this part fails, so that the save is aborted"


class Way(StrEnum):
    """A way to save a component of a step."""

    COPIED = "copied"
    OVERLAPPED = "overlapped"
    FUNCTION = "function"
    FAILING = "failing"
    """A function that raises."""


class Update(torch.optim.Optimizer):
    """An optimizer whose step adds one to its tensors, once."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Replaces torch's method, which imports torch's compiler: 0.8 s in each forked process."""
        self.param_groups.append(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        """See the class."""
        del closure
        for weights in self.param_groups[0]["params"]:
            weights.add_(1)
        self.param_groups[0]["params"].clear()


class Saver:
    """One rank's coordinator, and the optimizer that overlapped copies delay."""

    def __init__(self, coordinator: CheckpointCoordinator) -> None:
        self.coordinator = coordinator
        self._optimizer = Update()
        coordinator.guard(self._optimizer)

    def save(
        self, way: Way, name: str, state: dict[str, Any], step: int, *, is_state_dict: bool
    ) -> None:
        """Call `CheckpointCoordinator.save_async`; call `update` afterwards."""
        coordinator, weights = self.coordinator, state["weights"]
        if way is Way.FUNCTION:
            file = shard_file_name(name, coordinator.rank, coordinator.world_size)
            data = _archive(state)  # the data that a function reads must not change
            coordinator.save_async(
                name, lambda place: _write(place / file, data), step, is_state_dict
            )
        elif way is Way.FAILING:
            coordinator.save_async(name, _fail, step, is_state_dict)
        elif way is Way.OVERLAPPED:
            held = self._optimizer.param_groups[0]["params"]
            if not any(weights is one for one in held):  # a retry after an earlier failure
                held.append(weights)
            coordinator.save_async(name, state, step, is_state_dict, overlapped=True)
            return  # the update waits for the copy
        else:
            coordinator.save_async(name, state, step, is_state_dict)
        weights.add_(1)

    def update(self) -> None:
        """The optimizer's step, before the next write to the state; waits for overlapped copies."""
        self._optimizer.step()


def _fail(_: Path) -> None:
    raise RuntimeError(FAILURE)


def _archive(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(data)
