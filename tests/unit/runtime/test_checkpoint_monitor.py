"""`CheckpointMonitor`: with the coordinator alone, in this process and sent to another."""

import asyncio
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trainsync
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import committed_steps, read_manifest


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[trainsync.CheckpointMonitor]:
    made = trainsync.CheckpointMonitor(tmp_path / "run", max_to_keep=2)
    yield made
    made.close()


def test_a_coordinator_needs_nothing_else_and_commits(
    monitor: trainsync.CheckpointMonitor, tmp_path: Path
) -> None:
    coordinator = trainsync.CheckpointCoordinator(monitor)
    for step in (1, 2, 3):
        coordinator.save_async("model", {"w": torch.ones(step)}, step)
        saved = asyncio.run(
            coordinator.register_and_monitor(step, checkpoint_participants=[("model", 0)])
        )
        assert saved.state is SaveState.COMMITTED
    coordinator.wait_all(30)
    monitor.close()
    assert committed_steps(RunDirectory(tmp_path / "run"), SaveKind.CHECKPOINT) == [2, 3]


def save_as_rank_1(sent: bytes) -> None:
    coordinator = trainsync.CheckpointCoordinator(pickle.loads(sent), rank=1, world_size=2)
    coordinator.save_async("model", {"w": torch.zeros(2)}, 1)
    coordinator.wait_all(30)


def test_sent_to_another_process_it_is_the_same_monitor(
    monitor: trainsync.CheckpointMonitor, tmp_path: Path
) -> None:
    other = multiprocessing.get_context("spawn").Process(
        target=save_as_rank_1, args=(pickle.dumps(monitor),)
    )
    other.start()
    coordinator = trainsync.CheckpointCoordinator(monitor, rank=0, world_size=2)
    coordinator.save_async("model", {"w": torch.ones(2)}, 1)
    everyone = trainsync.all_ranks("model", world_size=2)
    saved = asyncio.run(
        coordinator.register_and_monitor(1, checkpoint_participants=everyone, timeout=60)
    )
    other.join(60)
    assert (other.exitcode, saved.state) == (0, SaveState.COMMITTED)
    manifest = read_manifest(RunDirectory(tmp_path / "run"), SaveKind.CHECKPOINT, 1).manifest
    assert len(manifest.files) == 2


def test_a_second_monitor_of_the_directory_takes_the_next_attempt(
    monitor: trainsync.CheckpointMonitor, tmp_path: Path
) -> None:
    monitor.close()
    second = trainsync.CheckpointMonitor(tmp_path / "run")
    second.close()
    assert (monitor.attempt, second.attempt) == (0, 1)


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("register_thread_count", r"CheckpointCoordinator\.register\("),
        ("monitor_step", r"CheckpointCoordinator\.register_and_monitor"),
        ("notify_started", r"CheckpointCoordinator\.save_async"),
        ("notify_finished", r"CheckpointCoordinator\.save_async"),
        ("no_such_thing", "has no no_such_thing$"),
    ],
)
def test_calls_of_the_references_actor_name_what_does_it_here(
    monitor: trainsync.CheckpointMonitor, name: str, now: str
) -> None:
    with pytest.raises(AttributeError, match=now):
        getattr(monitor, name)
    with pytest.raises(TypeError, match=r"expected RunContext\.from_env\(\)\.coordinator\(\)"):
        trainsync.CheckpointMonitor.get_actor(namespace="ns")
