"""Who shares the trainer's memory and dies, or stops, at any phase: nobody else even notices.

``TRAINSYNC_BROADCAST_FAULTS=N`` tries every case N times.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.failpoints import POINTS
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.distributed.weights.broadcast.broadcast_job import DEADLINES, Job

TIMES = int(os.environ.get("TRAINSYNC_BROADCAST_FAULTS", "1"))
LIMIT = DEADLINES.whole + 10.0
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
OF_GROUPS = ("joining", "joined")  # there is no group to make

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120 + 60 * TIMES)]


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as name:
        yield Path(name)


@pytest.fixture
def job(tmp_path: Path, memory: Path) -> Iterator[Job]:
    job = Job(tmp_path, explorers=2, shared_memory=memory)
    job.join("far", near=False)
    assert job.trainer.ask("wait_for", 3, 30.0)
    yield job
    job.end()


def timed_broadcast(job: Job, version: int) -> BroadcastReport:
    started = time.monotonic()
    report: BroadcastReport = job.trainer.ask("broadcast", version, seconds=LIMIT)
    assert time.monotonic() - started <= LIMIT
    return report


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("phase", [name for name in POINTS["receive"] if name not in OF_GROUPS])
def test_a_lost_explorer_of_the_host_does_not_even_cost_a_second_pass(
    job: Job, phase: str, number: signal.Signals
) -> None:
    version = 1
    timed_broadcast(job, version)
    for repeat in range(TIMES):
        version += 1
        victim = job.explorers["explorer-1"]
        victim.ask("arm", phase, number, 1 if phase != "bucket" else 1 + repeat % 8)
        report = timed_broadcast(job, version)
        assert {"explorer-0", "far"} <= set(report.served), report
        assert report.passes == 1, report
        if phase != "acknowledged":  # then it has answered, and is lost afterwards
            assert "explorer-1" in report.lost, report

        for _ in range(3):  # what the lost one may still serve is not written to
            version += 1
            assert {"explorer-0", "far"} <= set(timed_broadcast(job, version).served)
        if number == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
        else:
            victim.end()
            victim = job.join("explorer-1")
        assert job.trainer.ask("wait_for", 3, 30.0), job.trainer.ask("quarantined")
        job.trainer.ask("catch_up", version)
        assert victim.ask("wait_newer", version - 1, 30.0) == version
        assert job.check() > 0


@pytest.mark.parametrize("phase", [name for name in POINTS["send"] if name not in OF_GROUPS])
def test_what_a_killed_trainer_leaves_is_served_on_and_removed_by_the_next(
    job: Job, memory: Path, phase: str
) -> None:
    timed_broadcast(job, 1)
    for repeat in range(TIMES):
        job.trainer.ask("arm", phase, signal.SIGKILL, 1 if phase != "bucket" else 1 + repeat % 8)
        job.trainer.begin("broadcast", 2)
        job.trainer.process.join(LIMIT)
        assert not job.trainer.process.is_alive()
        (left,) = memory.iterdir()
        job.replace_trainer(attempt=1 + repeat)
        assert not left.exists()
        assert {job.explorers[f"explorer-{n}"].ask("version") for n in (0, 1)} <= {1, 2}
        job.check()
        assert job.trainer.ask("wait_for", 3, 30.0), "an explorer did not come"
        report = timed_broadcast(job, 1)
        assert report.same_host == ("explorer-0", "explorer-1"), report
        assert [explorer.ask("version") for explorer in job.explorers.values()] == [1, 1, 1]
        job.check()


@pytest.mark.parametrize("phase", ["bucket", "committed"])
def test_a_trainer_that_stops_and_comes_back_goes_on(job: Job, phase: str) -> None:
    timed_broadcast(job, 1)
    job.trainer.ask("arm", phase, signal.SIGSTOP, 1)
    job.trainer.begin("broadcast", 2)
    with pytest.raises(WeightsUnavailableError, match="no version after 1 came"):
        job.explorers["explorer-0"].ask("wait_newer", 1, DEADLINES.silence + 1.0)
    job.check()
    job.trainer.signal(signal.SIGCONT)
    report: BroadcastReport = job.trainer.result(LIMIT)
    assert job.trainer.ask("wait_for", 3, 30.0), report
    job.trainer.ask("catch_up", 2)
    assert [explorer.ask("version") for explorer in job.explorers.values()] == [2, 2, 2]
    job.check()


def test_an_explorer_of_another_host_that_is_lost_costs_those_of_this_one_only_time(
    job: Job,
) -> None:
    timed_broadcast(job, 1)
    job.explorers["far"].ask("arm", "bucket", signal.SIGKILL, 2)
    report = timed_broadcast(job, 2)
    assert report.same_host == ("explorer-0", "explorer-1"), report
    assert "far" in report.lost
    job.check("explorer-0", "explorer-1")
