"""Explorers and trainers that die, stop or come back at every phase: nobody hangs.

``TRAINSYNC_BROADCAST_FAULTS=N`` tries every case N times.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.weights.broadcast import BroadcastReport
from trainsync.weights.broadcast_hooks import RECEIVE_PHASES, SEND_PHASES
from trainsync.weights.errors import WeightsUnavailableError

from tests.distributed.broadcast_job import DEADLINES, Job

TIMES = int(os.environ.get("TRAINSYNC_BROADCAST_FAULTS", "1"))
LIMIT = DEADLINES.whole + 10.0
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120 + 60 * TIMES)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, explorers=3)
    yield job
    job.end()


def timed_broadcast(job: Job, version: int) -> BroadcastReport:
    started = time.monotonic()
    report: BroadcastReport = job.trainer.ask("broadcast", version, seconds=LIMIT)
    assert time.monotonic() - started <= LIMIT
    return report


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("phase", RECEIVE_PHASES)
def test_a_lost_explorer_costs_the_others_nothing_but_time(
    job: Job, phase: str, number: signal.Signals
) -> None:
    version = 1
    if phase not in ("joining", "joined"):  # those come with a new group only
        timed_broadcast(job, version)
    for repeat in range(TIMES):
        version += 1
        victim = job.explorers["explorer-1"]
        victim.ask("arm", phase, number, 1 if phase != "bucket" else 1 + repeat % 8)
        report = timed_broadcast(job, version)
        assert {"explorer-0", "explorer-2"} <= set(report.served), report
        if phase != "acknowledged":  # then it has answered, and is lost afterwards
            assert "explorer-1" in report.lost, report
        for name in ("explorer-0", "explorer-2"):
            assert job.explorers[name].ask("version") == version
        job.check("explorer-0", "explorer-2")

        version += 1  # the survivors go on without it
        report = timed_broadcast(job, version)
        assert {"explorer-0", "explorer-2"} <= set(report.served), report

        if number == signal.SIGSTOP:  # it finds that its group is over
            victim.signal(signal.SIGCONT)
        else:
            victim.end()
            victim = job.join("explorer-1")
        assert job.trainer.ask("wait_for", 3, 10.0), job.trainer.ask("quarantined")
        job.trainer.ask("catch_up", version)
        assert victim.ask("wait_newer", version - 1, 10.0) == version
        assert job.check() > 0


@pytest.mark.parametrize("phase", SEND_PHASES)
def test_a_trainer_that_is_killed_leaves_one_whole_version_and_the_next_one_goes_on(
    job: Job, phase: str
) -> None:
    timed_broadcast(job, 1)
    for repeat in range(TIMES):
        if phase in ("joining", "joined"):
            job.explorers["explorer-2"].end()
            job.join("explorer-2")
            assert job.trainer.ask("wait_for", 3, 10.0)
        job.trainer.ask("arm", phase, signal.SIGKILL, 1 if phase != "bucket" else 1 + repeat % 8)
        job.trainer.begin("broadcast", 2)
        job.trainer.process.join(LIMIT)
        assert not job.trainer.process.is_alive()
        with pytest.raises(WeightsUnavailableError):
            job.explorers["explorer-0"].ask("wait_newer", 2, 0.2)
        assert {job.explorers[f"explorer-{n}"].ask("version") for n in (0, 1)} <= {1, 2}
        job.check()
        job.replace_trainer(attempt=1 + repeat)
        assert job.trainer.ask("wait_for", 3, 20.0), "an explorer did not come"
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
        assert job.trainer.ask("wait_for", 3, 10.0)
    job.trainer.ask("arm", phase, signal.SIGSTOP, 1)
    job.trainer.begin("broadcast", 2)
    with pytest.raises(WeightsUnavailableError, match="no version after 2 came"):
        job.explorers["explorer-0"].ask("wait_newer", 2, 3 * DEADLINES.silence)
    job.check()
    job.trainer.signal(signal.SIGCONT)
    report: BroadcastReport = job.trainer.result(LIMIT)
    assert job.trainer.ask("wait_for", 3, 10.0), report
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
        assert job.trainer.ask("wait_for", 3, 10.0)
        job.trainer.ask("catch_up", 2)
    assert late.ask("version") == 2
    job.check("explorer-0", "explorer-2", "late")
