"""Registrations that are refused, and monitors that do not answer."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import ReceiptHint, SaveKind, SaveRequest, SaveState, SaveStatus
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.errors import InvalidRequestError, MonitorUnavailableError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.pointers import read_pointer

from tests.unit.checkpoint.coordinator.coordinators import INCARNATION
from tests.waiting import eventually


@pytest.mark.parametrize("patience", [0, 0.05])
def test_an_unreachable_monitor_does_not_block_the_registering_rank(
    monitor: LocalMonitorClient, tmp_path: Path, patience: float
) -> None:
    back = threading.Event()

    class Away(DiskMonitorClient):
        def register(self, request: SaveRequest) -> SaveStatus:
            assert back.wait(60)
            return super().register(request)

    away = Away(tmp_path / "run", attempt=0, incarnation=INCARNATION)
    made = CheckpointCoordinator(away, tmp_path / "run")
    began = time.monotonic()
    for step in (1, 2, 3):
        made.register(step, checkpoint_participants=[("model", 0)], patience=patience)
        made.save_sync("model", {"w": torch.ones(1)}, step)
    assert time.monotonic() - began < 30
    assert not back.is_set()
    back.set()
    made.commits.wait(30)
    assert read_pointer(RunDirectory(tmp_path / "run"), SaveKind.CHECKPOINT) == 3


def test_registering_other_participants_is_refused_at_once(
    coordinator: CheckpointCoordinator,
) -> None:
    coordinator.register(1, checkpoint_participants=[("model", 0)])
    with pytest.raises(InvalidRequestError, match="other participants"):
        coordinator.register(1, checkpoint_participants=[("model", 0), ("optim", 0)])


def test_without_patience_a_refusal_is_raised_by_the_next_call(
    coordinator: CheckpointCoordinator,
) -> None:
    def refused(step: int) -> None:
        coordinator.register(step, checkpoint_participants=[("model", 0)])
        coordinator.register(step, checkpoint_participants=[("optim", 0)], patience=0)
        eventually(lambda: coordinator.commits._followed[-1].ended.is_set())

    refused(1)
    with pytest.raises(InvalidRequestError, match="other participants"):
        coordinator.register(2, checkpoint_participants=[("model", 0)])
    refused(3)
    with pytest.raises(InvalidRequestError, match="other participants"):
        asyncio.run(coordinator.register_and_monitor(3, timeout=60))


def test_what_cannot_be_registered_is_refused_in_a_sentence(
    coordinator: CheckpointCoordinator,
) -> None:
    with pytest.raises(ValueError, match="patience must not be negative, got -1"):
        coordinator.register(2, checkpoint_participants=[("model", 0)], patience=-1)
    for pair in (("No Name", 0), ("model", -1)):
        with pytest.raises(ValueError, match=r"^step 2: participant .* is refused: expected a"):
            coordinator.register(2, checkpoint_participants=[pair])


def test_a_monitor_that_is_away_does_not_hold_up_the_next_save(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    back = threading.Event()

    class Away(DiskMonitorClient):
        def receipt(self, hint: ReceiptHint) -> None:
            assert back.wait(30)
            raise MonitorUnavailableError("was away")

    away = Away(tmp_path / "run", attempt=0, incarnation=INCARNATION)
    coordinator = CheckpointCoordinator(away, tmp_path / "run", staging_slots=1, staging_timeout=5)
    for step in (1, 2, 3):
        coordinator.save_async("model", {"step": step}, step)
    coordinator.save_sync("model", {"step": 4}, 4)
    coordinator.wait_all(timeout=30)
    assert coordinator.stats.written_files == 4
    back.set()
    eventually(lambda: coordinator.stats.unreported == 4)
    # Its receipts are on disk, where the monitor finds them.
    coordinator.register(4, checkpoint_participants=[("model", 0)])
    status = monitor.save_status(SaveKind.CHECKPOINT, 4, wait_seconds=20)
    assert status.state is SaveState.COMMITTED


def test_registering_no_participant_is_an_error(coordinator: CheckpointCoordinator) -> None:
    with pytest.raises(ValueError, match="at least one participant"):
        coordinator.register(1)
