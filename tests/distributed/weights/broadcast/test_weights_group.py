"""Versions through a process group of torch: real processes, with gloo in the place of NCCL.

Explorers that are lost amid it are in `make faults` (``group_receiver_lost``), a slice of which is
in test_faults_slice.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.weights.errors import InconsistentUploadError
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport

from tests.distributed.weights.broadcast.broadcast_job import Job, raw, weights
from tests.distributed.weights.broadcast.broadcast_loss import timed_broadcast

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

ALL = ("explorer-0", "explorer-1", "explorer-2")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, explorers=3, group=True)
    yield job
    job.end()


def check_bytes(job: Job, version: int) -> None:
    expected = {
        name: (str(tensor.dtype), tuple(tensor.shape), raw(tensor))
        for name, tensor in weights(version)
    }
    for explorer in job.explorers.values():
        assert explorer.ask("tensors") == expected


def test_every_version_arrives_bit_for_bit_in_one_pass_through_a_group_that_is_kept(
    job: Job,
) -> None:
    joined = [explorer.ask("count", "joined") for explorer in job.explorers.values()]
    assert joined == [0, 0, 0]
    for version in (1, 2, 3):
        report = timed_broadcast(job, version)
        assert (report.served, report.group, report.passes) == (ALL, ALL, 1)
        assert report.digest is not None and report.digest.startswith("nh-128:")
        check_bytes(job, version)
    joined = [explorer.ask("count", "joined") for explorer in job.explorers.values()]
    assert joined == [1, 1, 1], "the group was made more than once"
    job.check()


def test_a_late_explorer_catches_up_by_the_chain_and_is_of_the_next_group(job: Job) -> None:
    timed_broadcast(job, 1)
    job.join("late")
    assert job.trainer.ask("wait_for", 4, 30.0)
    caught_up: BroadcastReport = job.trainer.ask("catch_up", 1)
    assert (caught_up.served, caught_up.group) == (("late",), ())
    check_bytes(job, 1)
    report = timed_broadcast(job, 2)
    assert report.group == (*ALL, "late")
    check_bytes(job, 2)
    assert job.explorers["explorer-0"].ask("count", "joined") == 2
    job.check()


def test_explorers_outside_the_group_get_the_same_version_by_the_chain(job: Job) -> None:
    job.join("plain", group=False)
    assert job.trainer.ask("wait_for", 4, 30.0)
    report = timed_broadcast(job, 1)
    assert (report.served, report.group) == ((*ALL, "plain"), ALL)
    check_bytes(job, 1)
    assert len({explorer.ask("digest") for explorer in job.explorers.values()}) == 1
    job.check()


def test_what_arrives_damaged_is_not_served_and_comes_again_by_the_chain(job: Job) -> None:
    timed_broadcast(job, 1)
    job.explorers["explorer-1"].ask("spoil")
    report = timed_broadcast(job, 2)
    assert (report.served, report.lost) == (ALL, {})
    assert report.group == ("explorer-0", "explorer-2")
    check_bytes(job, 2)
    job.check()
    assert timed_broadcast(job, 3).group == ALL


def test_weights_that_changed_since_they_went_through_the_group_are_not_caught_up(
    job: Job,
) -> None:
    timed_broadcast(job, 1)
    late = job.join("late")
    assert job.trainer.ask("wait_for", 4, 30.0)
    with pytest.raises(InconsistentUploadError, match="when they were sent before"):
        job.trainer.ask("catch_up", 2)  # the weights of version 2
    assert late.ask("version") == -1
