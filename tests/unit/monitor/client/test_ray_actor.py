"""The actor's class without Ray: Ray only carries the calls."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveState
from trainsync.api.spec import SaveStrategy
from trainsync.monitor.client.ray_actor import WRITER_SECONDS, CheckpointMonitor
from trainsync.monitor.errors import ClaimRefusedError, WriterTimeoutError
from trainsync.monitor.ledger.write_leases import TTL_SECONDS
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


@pytest.mark.parametrize(
    ("strategy", "same_process", "same_node"),
    [
        (SaveStrategy.UNRESTRICTED, True, True),
        (SaveStrategy.SINGLE_NODE, True, True),
        (SaveStrategy.SINGLE_PROCESS, True, False),
        (SaveStrategy.SINGLE_THREAD, False, False),
    ],
)
async def test_a_writer_starts_when_the_strategy_lets_it(
    tmp_path: Path, strategy: SaveStrategy, same_process: bool, same_node: bool
) -> None:
    actor = CheckpointMonitor(str(tmp_path), 0, FIRST.incarnation, save_strategy=strategy)
    await actor.notify_started("node-1", "job-1", 5, component="model", rank=0)
    others = {
        ("node-1", "optim", 0): same_process,
        ("node-1", "model", 1): same_node,
        ("node-2", "model", 2): strategy is SaveStrategy.UNRESTRICTED,
    }
    for (node, component, rank), at_once in others.items():
        started = asyncio.create_task(
            actor.notify_started(node, "job-1", 5, component=component, rank=rank)
        )
        await asyncio.sleep(0.05)
        assert started.done() is at_once, (node, component, rank)
        if not at_once:
            await actor.notify_finished(5, component="model", rank=0, error="gone")
            await asyncio.wait_for(started, 20)
        await actor.notify_finished(5, component=component, rank=rank, error="gone")
        await actor.notify_started("node-1", "job-1", 5, component="model", rank=0)
    await actor.close()


@pytest.fixture
def seconds() -> list[float]:
    """What the actor's clock shows, for a test to set."""
    return [0.0]


@pytest.fixture
async def one_at_a_time(tmp_path: Path, seconds: list[float]) -> AsyncIterator[CheckpointMonitor]:
    """Writer 0 writes, at second 0."""
    actor = CheckpointMonitor(
        str(tmp_path), 0, FIRST.incarnation,
        save_strategy=SaveStrategy.SINGLE_THREAD, monotonic=lambda: seconds[0],
    )  # fmt: skip
    await actor.notify_started("node-1", "job-1", 5, rank=0)
    yield actor
    await actor.close()


async def test_a_writer_that_dies_holds_the_others_for_one_lease(
    one_at_a_time: CheckpointMonitor, seconds: list[float]
) -> None:
    actor = one_at_a_time
    waiting = asyncio.create_task(actor.notify_started("node-1", "job-1", 5, rank=1))
    await asyncio.sleep(0.05)
    seconds[0] = TTL_SECONDS - 1
    await actor.notify_finished(4, rank=9)  # wakes nobody, changes nothing
    assert not waiting.done()
    seconds[0] = TTL_SECONDS + 1
    await asyncio.wait_for(waiting, 20)
    assert [w.rank for w in await actor.in_progress()] == [0, 1]
    assert not await actor.notify_writing(5, rank=0), "the other one writes now"
    assert await actor.notify_writing(5, rank=1)


async def test_a_writer_keeps_its_turn_for_as_long_as_it_says_that_it_writes(
    one_at_a_time: CheckpointMonitor, seconds: list[float]
) -> None:
    actor = one_at_a_time
    waiting = asyncio.create_task(actor.notify_started("node-1", "job-1", 5, rank=1))
    for _ in range(20):
        seconds[0] += TTL_SECONDS / 3
        assert await actor.notify_writing(5, rank=0)
        await asyncio.sleep(0)
    assert not waiting.done()
    await actor.notify_finished(5, rank=0, error="gone")
    await asyncio.wait_for(waiting, 20)
    assert not await actor.notify_writing(5, rank=0), "it has finished"


async def test_a_writer_waits_no_longer_than_it_may_for_one_that_writes_on(
    one_at_a_time: CheckpointMonitor, seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainsync.monitor.client.ray_actor._LOOK_SECONDS", 0.001)
    actor = one_at_a_time
    waiting = asyncio.create_task(actor.notify_started("node-1", "job-1", 5, rank=1))
    while not waiting.done() and seconds[0] < 2 * WRITER_SECONDS:
        seconds[0] += TTL_SECONDS / 3
        assert await actor.notify_writing(5, rank=0)
        await asyncio.sleep(0.005)
    with pytest.raises(WriterTimeoutError, match=r"model\.0 of checkpoint 5"):
        await asyncio.wait_for(waiting, 20)
    assert await actor.notify_writing(5, rank=0)


async def test_a_writer_on_a_node_that_is_lost_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainsync.monitor.client.ray_actor._LOOK_SECONDS", 0.02)
    lost: set[str] = set()
    troubles = [ConnectionError("Ray is away")]

    def look() -> set[str]:
        if troubles:
            raise troubles.pop()
        return lost

    actor = CheckpointMonitor(
        str(tmp_path), 0, FIRST.incarnation,
        save_strategy=SaveStrategy.SINGLE_THREAD, lost_nodes=look,
    )  # fmt: skip
    await actor.notify_started("node-1", "job-1", 5, rank=0)
    waiting = asyncio.create_task(actor.notify_started("node-2", "job-1", 5, rank=1))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    lost.add("node-1")
    await asyncio.wait_for(waiting, 20)
    assert [writer.node_id for writer in await actor.in_progress()] == ["node-2"]
    await actor.close()


async def test_lost_nodes_are_looked_at_again_after_all_threads_were_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainsync.monitor.client.ray_actor._LOOK_SECONDS", 0.02)
    looked: list[bool] = []
    lost: set[str] = set()

    def look() -> set[str]:
        looked.append(True)
        return lost

    actor = CheckpointMonitor(
        str(tmp_path), 0, FIRST.incarnation,
        save_strategy=SaveStrategy.SINGLE_THREAD, lost_nodes=look,
    )  # fmt: skip
    free = threading.Event()
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    taken = threads.submit(free.wait, 60)
    await actor.notify_started("node-1", "job-1", 5, rank=0)
    waiting = asyncio.create_task(actor.notify_started("node-2", "job-1", 5, rank=1))
    await asyncio.sleep(0.2)  # many times longer than one waits for a look
    assert not looked
    lost.add("node-1")
    free.set()
    await asyncio.wait_for(waiting, 20)
    assert taken.result()
    assert [writer.node_id for writer in await actor.in_progress()] == ["node-2"]
    await actor.close()


def test_the_module_needs_no_ray_until_an_actor_is_asked_for() -> None:
    code = "import sys, trainsync.monitor.client.ray_actor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
