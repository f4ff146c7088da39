"""An explorer on the trainer's host is killed while the trainer writes weights to shared memory, or
while the explorer reads."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Final

from trainsync.failpoints import POINTS, RECEIVE
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

from tests.distributed.weights.broadcast.broadcast_job import Job, Process
from tests.distributed.weights.broadcast.broadcast_loss import (
    LIMIT,
    NEW_GROUP,
    OTHERS,
    VICTIM,
    timed_broadcast,
)
from tests.faults.scenario import Scenario
from tests.faults.trial import Trial

_LAYING: Final = "laying"  # the trainer has written a part of the weights and pauses
_SECONDS: Final = 20.0
_BUCKETS: Final = 8  # least number in a broadcast


def _killed(trial: Trial) -> None:
    log = os.open(trial.directory / "processes.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)  # for this trial's process and its children
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as memory:
        job = Job(
            trial.directory,
            explorers=3,
            shared_memory=Path(memory),
            context=multiprocessing.get_context("fork"),  # torch is imported already
        )
        try:
            _strike(trial, job)
        finally:
            job.end()


def _strike(trial: Trial, job: Job) -> None:
    timed_broadcast(job, 1)
    victim = job.explorers[VICTIM]
    count = trial.dice.randint(1, _BUCKETS)
    if trial.point == _LAYING:
        job.trainer.ask("arm", "bucket", signal.SIGSTOP, count)
        job.trainer.begin("broadcast", 2)
        _wait_stopped(job.trainer)
        victim.end()
        job.trainer.signal(signal.SIGCONT)
        report = job.trainer.result(LIMIT)
    else:
        victim.ask("arm", trial.point, signal.SIGKILL, count if trial.point == "bucket" else 1)
        report = timed_broadcast(job, 2)
    assert set(OTHERS) <= set(report.served) and set(OTHERS) <= set(report.same_host), report
    assert report.passes == 1, f"it cost the others another pass: {report}"
    if trial.point != "acknowledged":  # then the explorer has answered before its death
        assert VICTIM in report.lost, report
    for version in (3, 4, 5):  # so that both segments are rewritten
        assert set(OTHERS) <= set(timed_broadcast(job, version).same_host)
        assert [job.explorers[name].ask("version") for name in OTHERS] == [version] * 2
    job.check(*OTHERS)
    victim.end()
    job.join(VICTIM)
    assert job.trainer.ask("wait_for", 3, _SECONDS), job.trainer.ask("quarantined")
    report = timed_broadcast(job, 6)
    assert report.served == report.same_host == (OTHERS[0], VICTIM, OTHERS[1]), report
    job.check()


def _wait_stopped(process: Process) -> None:
    stat = Path(f"/proc/{process.process.pid}/stat")
    deadline = time.monotonic() + _SECONDS
    while stat.read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < deadline, "the trainer does not come to this bucket"
        time.sleep(0.002)  # polling interval


SCENARIOS = (
    Scenario(
        name="near_receiver_killed",
        broken="kill -9 of an explorer that reads the trainer's shared memory",
        holds=(
            "the trainer and the other explorers need no second pass and see no mixed or older "
            "version; what the dead one had mapped is used again; it comes back to the memory"
        ),
        points=(_LAYING, *(phase for phase in POINTS[RECEIVE] if phase not in NEW_GROUP)),
        trial=_killed,
    ),
)
