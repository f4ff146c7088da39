"""An explorer that dies during a broadcast of weights, at each of its phases."""

import multiprocessing
import os
import signal
from functools import partial

from trainsync.failpoints import POINTS, RECEIVE

from tests.distributed.weights.broadcast.broadcast_job import CUT, Job
from tests.distributed.weights.broadcast.broadcast_loss import NEW_GROUP, lose, timed_broadcast
from tests.distributed.weights.broadcast.broadcast_network import NEEDS_ROOT, Network
from tests.faults.scenario import Scenario
from tests.faults.trial import Trial

_BUCKETS = 8  # least number in a broadcast
_FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def _lost(fault: int, trial: Trial) -> None:
    _lose(trial, fault, trial.point)


def _lost_from_group(trial: Trial) -> None:
    name, phase = trial.point.split(" at ")
    _lose(trial, _FAULTS[name], phase, group=True)


def _lose(trial: Trial, fault: int, phase: str, *, group: bool = False) -> None:
    log = os.open(trial.directory / "processes.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)  # for this trial's process and its children: torch logs every lost member
    network = Network() if fault == CUT else None
    job = None
    try:
        job = Job(
            trial.directory,
            explorers=3,
            network=network,
            group=group,
            context=multiprocessing.get_context("fork"),  # torch is imported already
        )
        version = 1
        if phase not in NEW_GROUP:
            timed_broadcast(job, version)
        count = trial.dice.randint(1, _BUCKETS) if phase == "bucket" else 1
        version = lose(job, version + 1, phase, fault, count)
        report = timed_broadcast(job, version + 1)
        assert len(report.served) == 3, "not all are back"
        assert not group or report.group == report.served, "not all are a group again"
        job.check()
    finally:
        if job is not None:
            job.end()
        if network is not None:
            network.end()


_HOLDS = (
    "trainer and other explorers go on within timeoutSeconds + 10 s; nobody serves a mixed or an "
    "older version; the lost one comes back and gets the newest"
)

SCENARIOS = (
    Scenario(
        name="receiver_killed",
        broken="kill -9 of an explorer amid a broadcast of weights",
        holds=_HOLDS,
        points=POINTS[RECEIVE],
        trial=partial(_lost, signal.SIGKILL),
    ),
    Scenario(
        name="receiver_stopped",
        broken="SIGSTOP of an explorer amid a broadcast of weights, and SIGCONT when it is over",
        holds=_HOLDS,
        points=POINTS[RECEIVE],
        trial=partial(_lost, signal.SIGSTOP),
    ),
    Scenario(
        name="receiver_cut",
        broken="the network of an explorer ends without a word amid a broadcast of weights",
        holds=_HOLDS,
        points=POINTS[RECEIVE],
        trial=partial(_lost, CUT),
        needs_root=NEEDS_ROOT,
    ),
    Scenario(
        name="group_receiver_lost",
        broken="kill -9 or SIGSTOP of an explorer amid a broadcast through a process group (gloo)",
        holds=f"{_HOLDS}; the survivors are a new group with the next version, and all are again",
        points=(
            "killed at joining",
            "killed at bucket",
            "killed at received",
            "stopped at joining",
            "stopped at bucket",
            "stopped at flipping",
        ),
        trial=_lost_from_group,
    ),
)
