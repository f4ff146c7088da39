"""The actor's class without Ray: Ray only carries the calls."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveState
from trainsync.monitor.errors import ClaimRefusedError
from trainsync.monitor.ray_actor import CheckpointMonitor
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.saves import CHECKPOINT, FIRST, STATE_DICT, write


@pytest.fixture
async def monitor(tmp_path: Path) -> AsyncIterator[CheckpointMonitor]:
    actor = CheckpointMonitor(str(tmp_path), 0, FIRST.incarnation)
    yield actor
    await actor.close()


async def test_a_step_ends_when_every_counted_thread_has_finished(
    monitor: CheckpointMonitor, tmp_path: Path
) -> None:
    await monitor.register_thread_count(5, state_dict_thread_count=2, checkpoint_thread_count=2)
    waiting = asyncio.create_task(monitor.monitor_step(5))
    for rank in range(2):
        await monitor.notify_started("node-1", "job-1", 5, rank=rank)
        assert [w.rank for w in await monitor.in_progress()] == [rank]
        write(tmp_path, FIRST, 5, rank, CHECKPOINT)
        assert not waiting.done()
        await monitor.notify_finished(5, rank=rank)
    assert (await asyncio.wait_for(waiting, 20)).state is SaveState.COMMITTED
    short = await monitor.monitor_step(5, is_state_dict=True, timeout_seconds=0)
    assert short.state is SaveState.REGISTERED
    for rank in range(2):
        write(tmp_path, FIRST, 5, rank, STATE_DICT)
        await monitor.notify_finished(5, True, rank=rank)
    assert (await monitor.monitor_step(5, is_state_dict=True)).state is SaveState.COMMITTED


async def test_a_thread_that_finished_badly_ends_the_step_with_its_error(
    monitor: CheckpointMonitor, tmp_path: Path
) -> None:
    await monitor.register_thread_count(5, checkpoint_thread_count=2)
    await monitor.notify_started("node-1", "job-1", 5, rank=1)
    write(tmp_path, FIRST, 5, 0)
    await monitor.notify_finished(5, rank=1, error="OSError: disk full")
    status = await monitor.monitor_step(5)
    assert (status.state, status.error) == (SaveState.ABORTED, "model.1: OSError: disk full")
    assert await monitor.in_progress() == []
    assert RunDirectory(tmp_path).steps() == []


async def test_a_second_actor_for_the_attempt_is_refused(
    monitor: CheckpointMonitor, tmp_path: Path
) -> None:
    with pytest.raises(ClaimRefusedError):
        CheckpointMonitor(str(tmp_path), 0, "zzzzzzzz")


def test_the_module_needs_no_ray_until_an_actor_is_asked_for() -> None:
    code = "import sys, trainsync.monitor.ray_actor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
