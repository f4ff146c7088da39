"""A save that waits for something logs it in the process that can do something about it."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import NotRegisteredError, SaveTimeoutError
from trainsync.checkpoint.save.watch import WatchTimes
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient

from tests.waiting import eventually

INCARNATION = "0123456789abcdef"
STATE = {"w": torch.ones(10)}


# The ten seconds are half a second.
SOON = WatchTimes(poll=0.1, first_look=0.1, unregistered=0.5)


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path / "run", attempt=0, incarnation=INCARNATION, tick_seconds=0.02
    )
    client.claim("local")
    yield client
    client.close()


@pytest.fixture
def coordinator(monitor: LocalMonitorClient, tmp_path: Path) -> CheckpointCoordinator:
    return CheckpointCoordinator(monitor, tmp_path / "run", times=SOON)


def test_what_is_missing_is_told_after_ten_seconds() -> None:
    assert WatchTimes().unregistered == 10


def wait(coordinator: CheckpointCoordinator, step: int, *, state_dict: bool = False) -> None:
    asyncio.run(coordinator.register_and_monitor(step, state_dict, timeout=20))


def test_a_rank_with_an_unregistered_save_gets_the_name_of_the_missing_call(
    monitor: LocalMonitorClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskMonitorClient(tmp_path / "run", attempt=0, incarnation=INCARNATION)
    rank = CheckpointCoordinator(disk, tmp_path / "run", rank=1, world_size=2, times=SOON)
    with caplog.at_level(logging.WARNING, "trainsync.checkpoint"):
        rank.save_sync("model", STATE, 5)
        eventually(lambda: "coordinator.register(5, checkpoint_participants=...)" in caplog.text)
        rank.save_sync("model", STATE, 6)
        rank_0 = CheckpointCoordinator(monitor, tmp_path / "run", rank=0, world_size=2)
        rank_0.register(6, checkpoint_participants=[("model", 0), ("model", 1)])
        rank.save_sync("model", STATE, 7)
        eventually(lambda: "coordinator.register(7" in caplog.text)
    assert caplog.text.count("checkpoint of step 5 is written here and not registered") == 1
    assert "of step 6" not in caplog.text


def test_the_last_step_of_a_loop_that_saves_at_others_is_not_waited_for(
    coordinator: CheckpointCoordinator,
) -> None:
    """As with 42 steps, of which every fifth is saved."""
    coordinator.save_async("model", STATE, 40)
    coordinator.register(40, checkpoint_participants=[("model", 0)])
    with pytest.raises(NotRegisteredError) as heard:
        wait(coordinator, 42)
    assert "checkpoint of step 42 is not registered" in str(heard.value)
    assert "the newest that is registered is of step 40" in str(heard.value)
    assert "coordinator.register(42, checkpoint_participants=...)" in str(heard.value)
    wait(coordinator, 40)


def test_a_forgotten_is_state_dict_is_named(coordinator: CheckpointCoordinator) -> None:
    coordinator.save_async("model", STATE, 5, is_state_dict=True)
    coordinator.register(5, state_dict_participants=[("model", 0)])
    with pytest.raises(NotRegisteredError, match="is_state_dict=True waits for it"):
        wait(coordinator, 5)
    wait(coordinator, 5, state_dict=True)
    with pytest.raises(NotRegisteredError, match="none is"):
        wait(coordinator, 5)


def test_a_process_that_registers_nothing_waits_on_and_says_for_what(
    coordinator: CheckpointCoordinator,
    monitor: LocalMonitorClient,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another one may register the save yet."""
    driver = CheckpointCoordinator(monitor, tmp_path / "run", times=SOON)

    async def both() -> None:
        waiting = asyncio.create_task(driver.register_and_monitor(5, timeout=30))
        while "checkpoint of step 5 is not registered" not in caplog.text:
            assert not waiting.done()
            await asyncio.sleep(0.02)
        coordinator.save_async("model", STATE, 5)
        coordinator.register(5, checkpoint_participants=[("model", 0)])
        assert (await waiting).state is SaveState.COMMITTED

    with caplog.at_level(logging.WARNING, "trainsync.checkpoint"):
        asyncio.run(asyncio.wait_for(both(), 30))
    assert "none is" in caplog.text


def test_a_save_that_waits_for_parts_names_them(
    coordinator: CheckpointCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.save_async("model", STATE, 5)
    coordinator.register(5, checkpoint_participants=[("model", 0), ("optim", 0), ("optim", 1)])
    with (
        caplog.at_level(logging.WARNING, "trainsync.checkpoint"),
        pytest.raises(SaveTimeoutError),
    ):
        asyncio.run(coordinator.register_and_monitor(5, timeout=1.5))
    assert "checkpoint of step 5 waits for optim.0, optim.1, not written after" in caplog.text
    assert caplog.text.count("waits for") == 1


def test_how_long_a_save_may_miss_something_is_a_setting(tmp_path: Path) -> None:
    from trainsync.runtime.context import RunContext

    name = "TRAINSYNC_CHECKPOINT_SAVE_TIMEOUT_SECONDS"
    with RunContext.from_env(tmp_path / "run", environ={name: "1"}) as context:
        assert context.env()[name] == "1"
        context.coordinator(0, 1).save_sync("model", STATE, 5)
        status = context.monitor.save_status(SaveKind.CHECKPOINT, 5, 20)
        assert status.state is SaveState.ABORTED
        assert "no process registered the save within 1 s" in str(status.error)
