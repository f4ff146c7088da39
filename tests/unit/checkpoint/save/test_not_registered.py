"""A save never commits silently without a saved part: every participant must be registered."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync import failpoints
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveFailedError
from trainsync.checkpoint.save.registration import all_ranks
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient

from tests.waiting import eventually

STATE = {"weight": torch.ones(100)}


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(tmp_path, attempt=0, incarnation="aaaaaaaa0", tick_seconds=0.02)
    client.claim("local")
    yield client
    client.close()


def committed(monitor: LocalMonitorClient, step: int = 1) -> None:
    status = monitor.save_status(SaveKind.CHECKPOINT, step, wait_seconds=20)
    assert status.state is SaveState.COMMITTED


def test_a_component_that_comes_after_the_commit_and_is_not_registered_fails(
    tmp_path: Path, monitor: LocalMonitorClient
) -> None:
    coordinator = CheckpointCoordinator(monitor, tmp_path)
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    coordinator.save_async("model", STATE, 1)
    committed(monitor)
    coordinator.save_async("optim", STATE, 1)
    with pytest.raises(SaveFailedError, match=r"committed without optim\.0"):
        coordinator.wait_all(20)
    assert coordinator.stats.failures == 1


@pytest.mark.parametrize("phase", ["opened", "renamed"])
def test_one_that_is_being_written_during_the_commit_fails(
    tmp_path: Path, monitor: LocalMonitorClient, phase: str
) -> None:
    # Its files go with the staging, or its receipt comes late: it is heard either way.
    reached = threading.Event()

    def wait(name: str) -> None:
        if name == phase and not reached.is_set():
            reached.set()
            committed(monitor)
            save = tmp_path / ".staging/0-aaaaaaaa0/checkpoint/global_step_1"
            eventually(lambda: not (save / "files").exists())

    coordinator = CheckpointCoordinator(monitor, tmp_path)
    late = CheckpointCoordinator(monitor, tmp_path)
    failpoints.enable(failpoints.SAVE, wait)
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    late.save_async("optim", STATE, 1)
    assert reached.wait(20)
    coordinator.save_async("model", STATE, 1)
    with pytest.raises(SaveFailedError, match=r"committed without optim\.0"):
        late.wait_all(20)
        eventually(lambda: late.stats.failures == 1)
        late.wait_all(20)


def test_a_rank_that_is_not_registered_fails_and_the_monitor_says_so(
    tmp_path: Path, monitor: LocalMonitorClient
) -> None:
    disk = DiskMonitorClient(tmp_path, attempt=0, incarnation="aaaaaaaa0")
    first = CheckpointCoordinator(monitor, tmp_path, rank=0, world_size=2)
    second = CheckpointCoordinator(disk, tmp_path, rank=1, world_size=2)
    first.register(1, checkpoint_participants=all_ranks("model", world_size=1))
    first.save_async("model", STATE, 1)
    committed(monitor)
    second.save_async("model", STATE, 1)
    with pytest.raises(SaveFailedError, match=r"committed without model\.1"):
        second.wait_all(20)


def test_rank_0_may_save_one_for_all(tmp_path: Path, monitor: LocalMonitorClient) -> None:
    coordinator = CheckpointCoordinator(monitor, tmp_path, rank=0, world_size=3)
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    coordinator.save_async("model", STATE, 1)
    committed(monitor)
    coordinator.wait_all(20)


def test_a_step_that_an_older_attempt_committed_may_be_saved_again_while_it_is_tidied(
    tmp_path: Path, monitor: LocalMonitorClient
) -> None:
    first = CheckpointCoordinator(monitor, tmp_path)
    first.register(1, checkpoint_participants=[("model", 0)])
    first.save_async("model", STATE, 1)
    committed(monitor)
    with_again = LocalMonitorClient(tmp_path, attempt=1, incarnation="bbbbbbbb1", tick_seconds=0.02)
    with_again.claim("local")
    files = tmp_path / ".staging/1-bbbbbbbb1/checkpoint/global_step_1/files"

    def register(name: str) -> None:
        if name == "opened":
            again.register(1, checkpoint_participants=[("model", 0)])
            eventually(lambda: not files.exists())

    failpoints.enable(failpoints.SAVE, register)
    again = CheckpointCoordinator(with_again, tmp_path)
    again.save_async("model", STATE, 1)
    again.wait_all(20)
    status = with_again.save_status(SaveKind.CHECKPOINT, 1)
    assert (status.state, again.stats.failures) == (SaveState.COMMITTED, 0)
    with_again.close()
