"""kill -9 of a rank: what is whole in its memory is committed as the save that it was."""

import logging
import os
import signal
from pathlib import Path

import pytest
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import open_resume
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.checkpoint.rescue import rescuer

from tests.unit.checkpoint.memory import keeping_process
from tests.unit.checkpoint.memory.keeping import place_in
from tests.waiting import eventually

PATH = "actor/model_world_size_1_rank_0.pt"
KEPT = ["memory.told", *(f"save.{point}" for point in ("granted", "opened", "written", "fsynced"))]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path


def rescuers(directory: Path) -> list[int]:
    """Processes that outlive ranks of the run in ``directory``, by process id."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if str(directory / "run").encode() in words and any(b"rescue" in word for word in words):
            found.append(int(path.parent.name))
    return found


def resumed(directory: Path) -> int | None:
    """The step that the next attempt resumes from, whose state is of that step and in memory."""
    monitor = keeping_process.open_monitor(directory)
    try:
        point = monitor.resume()
        if point is None:
            return None
        resume = open_resume(directory / "run", point, memory=place_in(directory))
        with Sources(resume) as sources:
            assert sources.in_memory(PATH)
        assert float(load_shard(resume, PATH)["w"][0]) == float(resume.step)
        return resume.step
    finally:
        monitor.close()


@pytest.mark.parametrize("point", KEPT)
def test_a_save_that_is_whole_in_memory_outlives_the_kill_of_its_rank(
    directory: Path, point: str
) -> None:
    assert keeping_process.run(directory, [5, 6], f"{point}/2") == -signal.SIGKILL
    eventually(lambda: not rescuers(directory))
    assert resumed(directory) == 6


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_rank_of_two_components_outlives_its_kill_with_any_of_them_written(
    directory: Path, written: int
) -> None:
    """The receipts that it has itself stand."""
    assert keeping_process.run_two(directory, 6, written) == -signal.SIGKILL
    eventually(lambda: not rescuers(directory))
    assert resumed(directory) == 6


@pytest.mark.parametrize("point", ["save.staged", "memory.opened", "memory.sealing"])
def test_of_a_save_that_is_not_whole_in_memory_nothing_is_written(
    directory: Path, point: str
) -> None:
    assert keeping_process.run(directory, [5, 6], f"{point}/2") == -signal.SIGKILL
    eventually(lambda: not rescuers(directory))
    assert resumed(directory) == 5


def test_nothing_is_left_of_a_rank_that_ends_by_itself(directory: Path) -> None:
    assert keeping_process.run(directory, [5, 6]) == 0
    eventually(lambda: not rescuers(directory))
    assert resumed(directory) == 6


def test_what_outlives_a_rank_is_no_child_of_the_rank_and_goes_with_its_coordinator(
    directory: Path,
) -> None:
    monitor = keeping_process.open_monitor(directory)
    coordinator = CheckpointCoordinator(monitor, directory / "run", memory=place_in(directory))
    keeping_process.save(coordinator, 5)
    (process,) = rescuers(directory)
    parent, _, session = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1:4]
    assert int(parent) != os.getpid()
    assert int(session) != os.getsid(0)
    coordinator.saves.close(10)
    eventually(lambda: not rescuers(directory))
    monitor.close()


def test_a_rank_saves_on_where_nothing_can_outlive_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rescuer, "_CODE", "raise SystemExit(3)")
    monitor = keeping_process.open_monitor(directory)
    coordinator = CheckpointCoordinator(monitor, directory / "run", memory=place_in(directory))
    with caplog.at_level(logging.WARNING):
        keeping_process.save(coordinator, 5)
        keeping_process.save(coordinator, 6)
    assert caplog.text.count("is not saved after its death") == 1
    monitor.close()
    assert resumed(directory) == 6
