"""Trainers that die, stop or come back at every phase, and explorers in ways of their own.

An explorer that is killed, stopped or cut off at every phase is in `make faults`, a slice of which
is in test_faults_slice.py. ``TRAINSYNC_BROADCAST_FAULTS=N`` tries every case N times.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.failpoints import POINTS
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport
from trainsync.weights.transports.broadcast.deadlines import Deadlines, broadcast_seconds

from tests.distributed.weights.broadcast.broadcast_job import DEADLINES, Job
from tests.distributed.weights.broadcast.broadcast_loss import LIMIT, timed_broadcast

TIMES = int(os.environ.get("TRAINSYNC_BROADCAST_FAULTS", "1"))

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120 + 60 * TIMES)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, explorers=3)
    yield job
    job.end()


@pytest.mark.parametrize("phase", POINTS["send"])
def test_a_trainer_that_is_killed_leaves_one_whole_version_and_the_next_one_goes_on(
    job: Job, phase: str
) -> None:
    timed_broadcast(job, 1)
    for repeat in range(TIMES):
        if phase in ("joining", "joined"):
            job.explorers["explorer-2"].end()
            job.join("explorer-2")
            assert job.trainer.ask("wait_for", 3, 30.0)
        job.trainer.ask("arm", phase, signal.SIGKILL, 1 if phase != "bucket" else 1 + repeat % 8)
        job.trainer.begin("broadcast", 2)
        job.trainer.process.join(LIMIT)
        assert not job.trainer.process.is_alive()
        with pytest.raises(WeightsUnavailableError):
            job.explorers["explorer-0"].ask("wait_newer", 2, 0.2)
        assert {job.explorers[f"explorer-{n}"].ask("version") for n in (0, 1)} <= {1, 2}
        job.check()
        job.replace_trainer(attempt=1 + repeat)
        assert job.trainer.ask("wait_for", 3, 30.0), "an explorer did not come"
        report = timed_broadcast(job, 1)
        assert len(report.served) == 3, report
        assert [e.ask("version") for e in job.explorers.values()] == [1, 1, 1]
        job.check()


@pytest.mark.parametrize("phase", ["joining", "bucket", "committed"])
def test_a_trainer_that_stops_and_comes_back_goes_on(job: Job, phase: str) -> None:
    timed_broadcast(job, 1)
    if phase == "joining":
        job.explorers["explorer-2"].end()
        job.join("explorer-2")
        assert job.trainer.ask("wait_for", 3, 30.0)
    job.trainer.ask("arm", phase, signal.SIGSTOP, 1)
    job.trainer.begin("broadcast", 2)
    with pytest.raises(WeightsUnavailableError, match="no version after 2 came"):
        job.explorers["explorer-0"].ask("wait_newer", 2, DEADLINES.silence + 1.0)
    job.check()
    job.trainer.signal(signal.SIGCONT)
    report: BroadcastReport = job.trainer.result(LIMIT)
    assert job.trainer.ask("wait_for", 3, 30.0), report
    job.trainer.ask("catch_up", 2)
    assert [e.ask("version") for e in job.explorers.values()] == [2, 2, 2]
    job.check()


def test_all_explorers_lost_at_once_do_not_hold_the_trainer(job: Job) -> None:
    timed_broadcast(job, 1)
    for explorer in job.explorers.values():
        explorer.ask("arm", "bucket", signal.SIGSTOP, 2)
    report = timed_broadcast(job, 2)
    assert report.served == ()
    assert set(report.lost) == set(job.explorers)
    assert set(job.trainer.ask("quarantined")) == set(job.explorers)


@pytest.mark.parametrize("phase", ["idle", "bucket", "received"])
def test_one_explorer_that_is_stopped_costs_no_other_the_version_when_time_is_short(
    phase: str, tmp_path: Path
) -> None:
    """``sync.timeoutSeconds`` of 20, as `WeightPublisher` and `RunContext.explorer` take it."""
    seconds, bucket = broadcast_seconds(20.0), 16 << 20
    trainers, explorers = Deadlines.of(seconds, bucket), Deadlines.of(seconds, bucket)
    job = Job(tmp_path, explorers=3, deadlines=(trainers, explorers))
    try:
        job.trainer.ask("broadcast", 1)
        victim = job.explorers["explorer-1"]
        if phase == "idle":
            victim.signal(signal.SIGSTOP)
        else:
            victim.ask("arm", phase, signal.SIGSTOP, 1)
        report: BroadcastReport = job.trainer.ask("broadcast", 2)
        assert report.served == ("explorer-0", "explorer-2"), report
        assert set(report.lost) == {"explorer-1"}
        assert report.seconds < trainers.whole
        job.check("explorer-0", "explorer-2")
    finally:
        job.end()


def test_explorers_killed_between_broadcasts_are_left_out_without_loss_of_time(job: Job) -> None:
    timed_broadcast(job, 1)
    job.explorers["explorer-1"].end()
    report = timed_broadcast(job, 2)
    assert report.served == ("explorer-0", "explorer-2")
    assert report.seconds < DEADLINES.bucket * 5


def test_an_explorer_that_joins_in_mid_broadcast_gets_the_version(job: Job) -> None:
    timed_broadcast(job, 1)
    job.explorers["explorer-1"].ask("arm", "bucket", signal.SIGSTOP, 2)  # takes a while
    job.trainer.begin("broadcast", 2)
    late = job.join("late")
    report: BroadcastReport = job.trainer.result(LIMIT)
    if "late" not in report.served:  # it came after the last pass
        assert job.trainer.ask("wait_for", 3, 30.0)
        job.trainer.ask("catch_up", 2)
    assert late.ask("version") == 2
    job.check("explorer-0", "explorer-2", "late")
