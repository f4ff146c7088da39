"""State dicts of a step that is saved twice, or trained again."""

import asyncio
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import StepNotIncreasingError, UnsupportedStateError
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import read_receipt

from tests.unit.checkpoint.coordinator.coordinators import INCARNATION


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("again", ["save_async", "save_sync"])
def test_the_state_dict_of_a_step_again_joins_the_save_under_way(
    monitor: LocalMonitorClient,
    coordinator: CheckpointCoordinator,
    tmp_path: Path,
    shared: bool,
    again: str,
) -> None:
    """Also by another coordinator of the process, as a publisher of weights makes one."""
    other = coordinator if shared else CheckpointCoordinator(monitor, coordinator.directory)
    weights = torch.ones(1000)
    coordinator.save_async("model", {"w": weights}, 5, is_state_dict=True)
    weights.zero_()  # it is copied, and counts
    assert getattr(other, again)("model", {"w": weights}, 5, is_state_dict=True)
    other.wait_all(30)  # for the save that was joined
    save = RunDirectory(coordinator.directory).save(0, monitor.incarnation, SaveKind.STATE_DICT, 5)
    receipt = read_receipt(save.receipt("model", 0))
    (entry,) = receipt.files
    saved = torch.load(save.files_of(receipt.writer) / entry.path, weights_only=True)
    assert torch.equal(saved["w"], torch.ones(1000))
    asyncio.run(
        coordinator.register_and_monitor(
            5, is_state_dict=True, state_dict_participants=[("model", 0)], timeout=30
        )
    )
    assert other.save_async("model", {"w": weights}, 5, is_state_dict=True)  # committed is saved
    with pytest.raises(StepNotIncreasingError, match="must be greater than 5"):
        other.save_async("model", {"w": weights}, 4, is_state_dict=True)


def test_the_state_dict_of_a_step_that_failed_is_not_joined(
    coordinator: CheckpointCoordinator,
) -> None:
    with pytest.raises(UnsupportedStateError):
        coordinator.save_async("model", {"w": object()}, 5, is_state_dict=True)
    with pytest.raises(StepNotIncreasingError, match="must be greater than 5"):
        coordinator.save_async("model", {"w": torch.ones(1)}, 5, is_state_dict=True)


def test_the_state_dict_that_another_coordinator_failed_to_save_is_not_written_again(
    monitor: LocalMonitorClient, coordinator: CheckpointCoordinator
) -> None:
    other = CheckpointCoordinator(monitor, coordinator.directory)
    with pytest.raises(UnsupportedStateError):
        coordinator.save_async("model", {"w": object()}, 5, is_state_dict=True)
    assert not other.save_async("model", {"w": torch.ones(1)}, 5, is_state_dict=True)
    assert other.save_async("model", {"w": torch.ones(1)}, 6, is_state_dict=True)
    other.wait_all(30)


def test_a_state_dict_that_is_trained_again_takes_the_older_attempts_place(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    for attempt in range(2):
        client = LocalMonitorClient(
            directory, attempt=attempt, incarnation=f"{attempt}{INCARNATION[1:]}", tick_seconds=0.05
        )
        client.claim("local")
        made = CheckpointCoordinator(client, directory, staging_timeout=30)
        participants = all_ranks("model", world_size=1)
        made.register(10, state_dict_participants=participants)
        made.save_async("model", {"w": torch.full((4,), float(attempt))}, 10, is_state_dict=True)
        made.wait_all(30)
        status = asyncio.run(made.register_and_monitor(10, is_state_dict=True, timeout=30))
        assert status.state is SaveState.COMMITTED
        client.close()
    file = directory / "global_step_10" / "actor" / "model_world_size_1_rank_0.pt"
    assert torch.load(file, weights_only=True)["w"].tolist() == [1.0] * 4
