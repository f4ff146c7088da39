"""Explorers of the trainer's host read its memory: the same promises, without the wire."""

import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.distributed.weights.broadcast.broadcast_job import Job
from tests.distributed.weights.broadcast.test_weights_broadcast import all_kinds, grown, raw

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NEAR = ("explorer-0", "explorer-1")


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as name:
        yield Path(name)


@pytest.fixture
def job(tmp_path: Path, memory: Path) -> Iterator[Job]:
    job = Job(tmp_path, explorers=2, shared_memory=memory)
    yield job
    job.end()


def segments(memory: Path) -> list[Path]:
    """Of the one trainer that there is."""
    (folder,) = memory.iterdir()
    return [path for path in folder.iterdir() if path.name != "probe"]


def test_every_kind_of_tensor_is_served_bit_for_bit(job: Job) -> None:
    report: BroadcastReport = job.trainer.ask("broadcast", 1, all_kinds)
    assert report.served == report.same_host == NEAR
    expected = {
        name: (str(tensor.dtype), tuple(tensor.shape), raw(tensor)) for name, tensor in all_kinds()
    }
    for explorer in job.explorers.values():
        assert explorer.ask("tensors") == expected


def test_many_versions_need_no_more_than_two_segments_when_readers_keep_up(
    job: Job, memory: Path
) -> None:
    for version in range(1, 30):
        report = job.trainer.ask("broadcast", version)
        assert report.same_host == NEAR
        assert [explorer.ask("version") for explorer in job.explorers.values()] == [version] * 2
    assert len(segments(memory)) <= 2
    assert job.check() > 20


def test_explorers_of_this_host_and_of_others_get_the_same_pass(job: Job) -> None:
    job.join("far", near=False)
    assert job.trainer.ask("wait_for", 3, 30.0)
    for version in range(1, 6):
        report = job.trainer.ask("broadcast", version)
        assert report.served == (*NEAR, "far")
        assert report.same_host == NEAR
        assert report.passes == 1
        assert [e.ask("version") for e in job.explorers.values()] == [version] * 3
    tensors = [explorer.ask("tensors") for explorer in job.explorers.values()]
    assert tensors[0] == tensors[1] == tensors[2]
    job.check()


def test_what_a_reader_holds_on_to_is_never_written_to(job: Job, memory: Path) -> None:
    job.trainer.ask("broadcast", 1)
    slow = job.explorers["explorer-0"]
    slow.ask("hold")
    for version in range(2, 9):
        assert job.trainer.ask("broadcast", version).same_host == NEAR
        assert slow.ask("held") == (1, True)
        assert slow.ask("version") == version, "it cannot go on while somebody reads"
    assert len(segments(memory)) <= 2, "what is held must go with its reader"
    slow.ask("let_go")
    assert job.trainer.ask("broadcast", 9).same_host == NEAR
    job.check()


def test_without_room_the_wire_is_used_and_memory_again_when_there_is_some(job: Job) -> None:
    job.trainer.ask("limit_files", 1000)
    report = job.trainer.ask("broadcast", 1)
    assert report.served == NEAR
    assert report.same_host == ()
    job.trainer.ask("limit_files", resource.RLIM_INFINITY)
    report = job.trainer.ask("broadcast", 2)
    assert report.same_host == NEAR
    assert [explorer.ask("version") for explorer in job.explorers.values()] == [2, 2]
    job.check()


def test_another_schema_gets_other_memory(job: Job, memory: Path) -> None:
    job.trainer.ask("broadcast", 1)
    assert job.trainer.ask("broadcast", 7, grown).same_host == NEAR
    assert list(job.explorers["explorer-0"].ask("tensors")) == ["big", "more"]
    assert job.trainer.ask("broadcast", 8).same_host == NEAR
    assert len(segments(memory)) <= 2
    job.check()


def test_an_explorer_that_comes_late_catches_up_from_memory(job: Job) -> None:
    job.trainer.ask("broadcast", 3)
    job.join("late")
    assert job.trainer.ask("wait_for", 3, 30.0)
    assert job.trainer.ask("catch_up", 3).same_host == ("late",)
    assert job.trainer.ask("broadcast", 4).same_host == (*NEAR, "late")
    job.check()
