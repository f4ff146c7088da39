"""kill -9 at any point of keeping: the next process loads the commit, whatever lies in memory."""

import signal
from pathlib import Path

import pytest
import torch
from trainsync import failpoints
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import Resume, open_resume
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import committed_steps

from tests.unit.checkpoint.memory import keeping_process
from tests.unit.checkpoint.memory.keeping import digest_of, place_in

PATH = "actor/model_world_size_1_rank_0.pt"
POINTS = [f"memory.{point}/{hit}" for point in failpoints.POINTS["memory"] for hit in (1, 2)]
SAVES = [f"save.{point}/2" for point in failpoints.POINTS["save"]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path


def resume_of(directory: Path) -> Resume | None:
    monitor = keeping_process.open_monitor(directory)
    try:
        point = monitor.resume()
        if point is None:
            return None
        return open_resume(directory / "run", point, memory=place_in(directory))
    finally:
        monitor.close()


def resume_for(directory: Path, step: int) -> Resume:
    resume = resume_of(directory)
    assert resume is not None
    assert resume.step == step
    return resume


def damage_volume(resume: Resume) -> None:
    """Other bytes, as many as before."""
    path = resume.path / PATH
    path.write_bytes(b"\0" * path.stat().st_size)


def value_of(resume: Resume) -> float:
    tensor: torch.Tensor = load_shard(resume, PATH)["w"]
    assert bool((tensor == tensor[0]).all())
    assert tensor.shape == (keeping_process.VALUES,)
    return float(tensor[0])


def test_a_process_that_was_not_disturbed_leaves_its_last_commit_in_memory(
    directory: Path,
) -> None:
    assert keeping_process.run(directory, [5, 6, 7]) == 0
    resume = resume_of(directory)
    assert resume is not None
    damage_volume(resume)
    assert value_of(resume) == 7.0


@pytest.mark.parametrize("point", POINTS + SAVES)
def test_a_kill_at_any_point_leaves_nothing_that_is_loaded_wrongly(
    directory: Path, point: str
) -> None:
    # The begin of the fourth save drops a second time: an earlier one may not be heard in time.
    code = keeping_process.run(directory, [5, 6, 7, 8], point)
    assert code == -signal.SIGKILL
    for kept in place_in(directory).files():
        if kept.digest is not None:
            assert digest_of(place_in(directory).path(kept).read_bytes()) == kept.digest
    resume = resume_of(directory)
    if resume is not None:
        assert value_of(resume) == float(resume.step)
    # The next process saves on, and what the killed one left in flight does not stay.
    assert keeping_process.run(directory, [9]) == 0
    assert committed_steps(RunDirectory(directory / "run"), SaveKind.CHECKPOINT)[-1] == 9
    left = list(place_in(directory).files())
    assert all(kept.digest is not None for kept in left)
    # It may end before it hears of its last commit.
    assert {9} <= {kept.step for kept in left} <= {9, resume.step if resume else 9}


def test_a_kill_before_the_first_new_byte_leaves_old_bytes_under_no_digest(
    directory: Path,
) -> None:
    assert keeping_process.run(directory, [5, 6, 7], "memory.taken/1") == -signal.SIGKILL
    place = place_in(directory)
    (taken,) = [kept for kept in place.files() if kept.step == 7]
    assert taken.digest is None
    assert not taken.is_spare
    assert not [kept for kept in place.files() if kept.step == 5]
    assert place.path(taken).stat().st_size > 4 * keeping_process.VALUES  # those of step 5
    with Sources(resume_for(directory, 6)) as sources:
        assert sources.in_memory(PATH)


def test_a_kill_after_the_receipt_is_restored_from_memory(directory: Path) -> None:
    """The monitor commits what is whole on the volume, and memory has it already."""
    assert keeping_process.run(directory, [5, 6], "save.receipt/2") == -signal.SIGKILL
    resume = resume_of(directory)
    assert resume is not None
    assert resume.step == 6
    with Sources(resume) as sources:
        assert sources.in_memory(PATH)
