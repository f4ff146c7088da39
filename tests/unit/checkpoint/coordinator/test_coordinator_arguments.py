"""Names, steps and states that a save call refuses."""

from pathlib import Path

import pytest
import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import StepNotIncreasingError, UnsupportedStateError
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.errors import UnsafePathError


@pytest.mark.parametrize("step", [4, 5])
def test_a_step_that_is_not_after_the_last_is_refused(
    coordinator: CheckpointCoordinator, step: int
) -> None:
    coordinator.save_sync("model", {"w": torch.ones(1)}, 5)
    with pytest.raises(StepNotIncreasingError, match="must be greater than 5"):
        coordinator.save_async("model", {"w": torch.ones(1)}, step)
    coordinator.save_sync("model", {"w": torch.ones(1)}, step, is_state_dict=True)
    coordinator.save_sync("optim", {"lr": 1.0}, step)


@pytest.mark.parametrize("prefix", ["", "critic_"])
def test_a_name_that_is_no_name_is_refused_with_a_prefix_too(
    monitor: LocalMonitorClient, tmp_path: Path, prefix: str
) -> None:
    made = CheckpointCoordinator(monitor, tmp_path / "run", component_prefix=prefix)
    with pytest.raises(TypeError, match=r"name is 7\.5, expected a str"):
        made.save_async(7.5, {"w": torch.ones(1)}, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "Model", "a.b", "../x", "a" * 65])
def test_a_bad_component_name_is_refused(coordinator: CheckpointCoordinator, name: str) -> None:
    with pytest.raises(UnsafePathError, match="participant"):
        coordinator.save_async(name, {"weight": torch.zeros(1)}, 1)


@pytest.mark.parametrize(
    ("source", "step", "expected"),
    [
        (torch.nn.Linear(1, 1), 5, "got a Linear, expected its state_dict"),
        (torch.optim.SGD([torch.zeros(1)]), 5, "got a SGD, expected its state_dict"),
        (None, 5, "model: got None, expected a state"),
        ("weights.pt", 5, "model: got a builtins.str, expected a state"),
        ([torch.zeros(1)], 5, "model: got a builtins.list, expected a state"),
        (torch.zeros(1), 5, "model: got a torch.Tensor, expected a state"),
        ({}, 5.0, "global_step is 5.0, expected an integer"),
        ({}, True, "global_step is True, expected an integer"),
    ],
)
def test_what_is_no_state_and_no_step_is_refused_at_the_call(
    coordinator: CheckpointCoordinator, source: object, step: object, expected: str
) -> None:
    for save in (coordinator.save_async, coordinator.save_sync):
        with pytest.raises(TypeError, match=expected):
            save("model", source, step)  # type: ignore[arg-type]  # what a newcomer may try


def test_a_state_without_anything_in_it_is_refused_at_the_call(
    coordinator: CheckpointCoordinator,
) -> None:
    for save in (coordinator.save_async, coordinator.save_sync):
        with pytest.raises(ValueError, match="model: the state is empty"):
            save("model", {}, 1)


def test_a_state_that_holds_itself_is_refused_at_the_call_in_a_sentence(
    coordinator: CheckpointCoordinator,
) -> None:
    state: dict[str, object] = {"weight": torch.zeros(1)}
    state["again"] = [state]
    with pytest.raises(UnsupportedStateError, match="the state refers to itself"):
        coordinator.save_async("model", state, 1)
