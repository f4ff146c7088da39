"""The order of saves, staging memory, and the counters of both."""

import threading
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import read_receipt

from tests.unit.checkpoint.coordinator.coordinators import INCARNATION
from tests.waiting import eventually


def test_saves_of_one_name_are_written_one_after_the_other(
    coordinator: CheckpointCoordinator,
) -> None:
    go = threading.Event()
    order: list[str] = []

    def slow(directory: Path) -> None:
        assert go.wait(30)
        order.append("first")
        (directory / "first").write_text("")

    def fast(directory: Path) -> None:
        order.append("second")
        (directory / "second").write_text("")

    coordinator.save_async("model", slow, 1)
    coordinator.save_async("model", fast, 2)
    coordinator.save_async("other", lambda d: (d / "other").write_text(""), 2)
    eventually(lambda: coordinator.stats.written_files == 1)
    assert order == []
    go.set()
    coordinator.wait_all(timeout=30)
    assert order == ["first", "second"]


def test_a_third_save_waits_for_staging_memory_and_is_counted(
    coordinator: CheckpointCoordinator,
) -> None:
    go = threading.Event()

    def slow(directory: Path) -> None:
        assert go.wait(30)
        (directory / "x").write_text("")

    coordinator.save_async("model", slow, 1)
    coordinator.save_async("model", slow, 2)
    assert coordinator.stats.slot_waits == 0
    threading.Timer(0.2, go.set).start()
    coordinator.save_async("model", {"w": torch.ones(1)}, 3)
    assert go.is_set()
    stats = coordinator.stats
    assert stats.slot_waits == 1
    assert stats.last_blocked_seconds >= stats.slot_wait_seconds >= 0.1
    coordinator.wait_all(30)
    staging = RunDirectory(coordinator.directory).save(0, INCARNATION, SaveKind.CHECKPOINT, 3)
    receipt = read_receipt(staging.receipt("model", 0))
    assert receipt.blocked_seconds >= receipt.slot_seconds >= 0.1


def test_a_save_that_finds_no_staging_memory_in_time_aborts(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    coordinator = CheckpointCoordinator(
        monitor, tmp_path / "run", staging_slots=1, staging_timeout=0.05
    )
    go = threading.Event()

    def slow(directory: Path) -> None:
        assert go.wait(30)
        (directory / "x").write_text("")

    coordinator.save_async("model", slow, 1)
    coordinator.register(2, checkpoint_participants=[("model", 0)])
    try:
        with pytest.raises(SaveTimeoutError, match="checkpoint of step 2 waited"):
            coordinator.save_async("model", {"weight": torch.zeros(1)}, 2)
        assert monitor.save_status(SaveKind.CHECKPOINT, 2, 20).state is SaveState.ABORTED
        with pytest.raises(SaveTimeoutError, match=r"still being written: model-step1$"):
            coordinator.wait_all(timeout=0.01)
    finally:
        go.set()
    coordinator.wait_all(timeout=30)


def test_the_counters_tell_what_a_save_cost(coordinator: CheckpointCoordinator) -> None:
    coordinator.save_async("model", {"w": torch.ones(1000)}, 1)
    coordinator.wait_all(timeout=30)
    stats = coordinator.stats
    path = RunDirectory(coordinator.directory).save(0, INCARNATION, SaveKind.CHECKPOINT, 1).files
    size = sum(p.stat().st_size for p in path.rglob("*.pt"))
    assert (stats.saves, stats.in_flight, stats.failures) == (1, 0, 0)
    assert (stats.written_files, stats.written_bytes, stats.staged_bytes) == (1, size, 4032)
    assert 0 < stats.last_blocked_seconds == stats.blocked_seconds
    assert stats.write_seconds > 0
