"""A coordinator with memory: commits and aborts drop, and no trouble with memory is a save's."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync import failpoints
from trainsync.api.protocol import SaveKind, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveAbortedError, SaveFailedError
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import Resume, open_resume
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.monitor.client.local import LocalMonitorClient

from tests.unit.checkpoint.memory.keeping import INCARNATION, place_in
from tests.waiting import eventually

PATH = "actor/model_world_size_1_rank_0.pt"
PLACE = [("model", 0)]


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    (tmp_path / "shm").mkdir()
    client = LocalMonitorClient(
        tmp_path / "run", attempt=0, incarnation=INCARNATION, tick_seconds=0.05
    )
    client.claim("local")
    yield client
    client.close()


@pytest.fixture
def coordinator(monitor: LocalMonitorClient, tmp_path: Path) -> CheckpointCoordinator:
    return CheckpointCoordinator(monitor, tmp_path / "run", memory=place_in(tmp_path))


def save(coordinator: CheckpointCoordinator, step: int) -> None:
    coordinator.save_async("model", {"w": torch.full((1000,), float(step))}, step)
    coordinator.register(step, checkpoint_participants=PLACE)
    coordinator.finish(step, timeout=30)


def kept(directory: Path) -> list[int]:
    return sorted(file.step for file in place_in(directory).files() if not file.is_spare)


def sealed(directory: Path) -> list[int]:
    return sorted(file.step for file in place_in(directory).files() if file.digest is not None)


def resume_of(monitor: LocalMonitorClient, directory: Path) -> Resume:
    point = monitor.resume()
    assert point is not None
    return open_resume(directory / "run", point, memory=place_in(directory))


def test_a_commit_drops_what_was_kept_before_without_another_save(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    for step in (5, 6):
        save(coordinator, step)
    eventually(lambda: kept(tmp_path) == [6])


def test_a_state_is_whole_in_memory_while_the_save_before_it_is_written(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    go_on = threading.Event()

    def hold(point: str) -> None:
        if point == "written":
            assert go_on.wait(30)

    with failpoints.enabled(failpoints.SAVE, hold):
        for step in (5, 6):
            coordinator.register(step, checkpoint_participants=PLACE)
            coordinator.save_async("model", {"w": torch.full((1000,), float(step))}, step)
        eventually(lambda: sealed(tmp_path) == [5, 6])
        go_on.set()
        coordinator.wait_all(30)
    coordinator.finish(6, timeout=30)


def test_a_save_that_is_given_up_holds_no_memory(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    def fail(point: str) -> None:
        if point == "sealing":
            raise RuntimeError("memory is on fire")

    with failpoints.enabled(failpoints.MEMORY, fail):
        coordinator.save_async("model", {"w": torch.ones(10)}, 6)
        with pytest.raises(SaveFailedError, match="memory is on fire"):
            coordinator.wait_all(30)
    opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in opened if path.name.startswith("6-")]
    assert kept(tmp_path) == []


def test_a_rank_that_registers_nothing_hears_of_commits_from_the_volume(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    other = CheckpointCoordinator(
        monitor, tmp_path / "run", rank=1, world_size=2, memory=place_in(tmp_path)
    )
    for step in (5, 6):
        other.save_async("model", {"w": torch.ones(10)}, step)
        coordinator.register(step, checkpoint_participants=[("model", 1)])
        coordinator.finish(step, timeout=30)
    eventually(lambda: kept(tmp_path) == [6])


def test_an_abort_drops_what_was_kept_of_that_save(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    save(coordinator, 5)
    coordinator.register(6, checkpoint_participants=[("model", 0), ("optim", 0)])
    coordinator.save_async("model", {"w": torch.ones(10)}, 6)
    coordinator.wait_all(30)
    assert kept(tmp_path) == [5, 6]

    def explode(directory: Path) -> None:
        raise RuntimeError("the disk is on fire")

    coordinator.save_async("optim", explode, 6)
    with pytest.raises((SaveFailedError, SaveAbortedError)):
        coordinator.finish(6, timeout=30)
    assert monitor.save_status(SaveKind.CHECKPOINT, 6, 20).state is SaveState.ABORTED
    eventually(lambda: kept(tmp_path) == [5])


def test_what_came_from_memory_is_what_was_saved(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    save(coordinator, 5)
    resume = resume_of(monitor, tmp_path)
    (resume.path / PATH).write_bytes(b"\0" * resume.entry(PATH).bytes)
    assert torch.equal(load_shard(resume, PATH)["w"], torch.full((1000,), 5.0))


def test_without_room_in_memory_the_save_commits_and_is_loaded_from_the_volume(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    small = place_in(tmp_path, budget=100)
    coordinator = CheckpointCoordinator(monitor, tmp_path / "run", memory=small)
    save(coordinator, 5)
    assert kept(tmp_path) == []
    resume = resume_of(monitor, tmp_path)
    with Sources(resume) as sources:
        assert not sources.in_memory(PATH)
    assert torch.equal(load_shard(resume, PATH)["w"], torch.full((1000,), 5.0))


def test_without_a_memory_file_system_the_save_commits(
    monitor: LocalMonitorClient, tmp_path: Path
) -> None:
    (tmp_path / "shm").rmdir()
    coordinator = CheckpointCoordinator(monitor, tmp_path / "run", memory=place_in(tmp_path))
    save(coordinator, 5)
    assert torch.equal(
        load_shard(resume_of(monitor, tmp_path), PATH)["w"], torch.full((1000,), 5.0)
    )


def test_state_dicts_and_files_of_functions_are_on_the_volume_alone(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    coordinator.save_sync("model", {"w": torch.ones(10)}, 5, True)
    coordinator.save_sync("hf", lambda directory: (directory / "a").write_text("a"), 5)
    asyncio.run(
        coordinator.register_and_monitor(
            5,
            checkpoint_participants=[("hf", 0)],
            state_dict_participants=PLACE,
            timeout=30,
        )
    )
    assert kept(tmp_path) == []


@pytest.mark.parametrize("reuse", [False, True])
def test_a_state_dict_that_the_steps_checkpoint_has_too_is_kept_and_read_from_memory(
    coordinator: CheckpointCoordinator, monitor: LocalMonitorClient, tmp_path: Path, reuse: bool
) -> None:
    for step in (5, 6):
        weights = {"w": torch.full((1000,), float(step))}
        coordinator.save_async("model", weights, step, True, with_checkpoint=True)
        coordinator.save_async("optim", {"m": torch.ones(10)}, step)
        coordinator.register(
            step,
            state_dict_participants=PLACE,
            checkpoint_participants=[("optim", 0)],
            reuse_state_dict=reuse,
        )
        coordinator.finish(step, timeout=30)
    eventually(lambda: kept(tmp_path) == [6, 6])  # an older state dict goes as an older part does
    resume = resume_of(monitor, tmp_path)
    (resume.path / PATH).write_bytes(b"\0" * resume.entry(PATH).bytes)
    assert torch.equal(load_shard(resume, PATH)["w"], torch.full((1000,), 6.0))


def test_a_state_dict_of_a_checkpoint_that_is_aborted_is_dropped(
    coordinator: CheckpointCoordinator, tmp_path: Path
) -> None:
    coordinator.save_async("model", {"w": torch.ones(10)}, 5, True, with_checkpoint=True)
    coordinator.wait_all(30)
    assert kept(tmp_path) == [5]

    def explode(directory: Path) -> None:
        raise RuntimeError("the disk is on fire")

    coordinator.register(5, state_dict_participants=PLACE, checkpoint_participants=[("optim", 0)])
    coordinator.save_async("optim", explode, 5)
    with pytest.raises((SaveFailedError, SaveAbortedError)):
        coordinator.finish(5, timeout=30)
    eventually(lambda: kept(tmp_path) == [])
