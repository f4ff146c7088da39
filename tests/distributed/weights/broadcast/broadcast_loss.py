"""Checks for the loss of one explorer of three at a phase of a broadcast, and its return."""

import signal
import time

from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport

from tests.distributed.weights.broadcast.broadcast_job import CUT, DEADLINES, Job

VICTIM = "explorer-1"
OTHERS = ("explorer-0", "explorer-2")
LIMIT = DEADLINES.whole + 10.0
NEW_GROUP = ("joining", "joined")
"""Phases that occur only with a new group."""


def timed_broadcast(job: Job, version: int) -> BroadcastReport:
    """A broadcast that must end within the promised time."""
    started = time.monotonic()
    report: BroadcastReport = job.trainer.ask("broadcast", version, seconds=LIMIT)
    assert time.monotonic() - started <= LIMIT, "the trainer was held too long"
    return report


def lose(job: Job, version: int, phase: str, fault: int, count: int = 1) -> int:
    """Inject the fault, and check that the other explorers continue and the lost one can return.

    Args:
        version: greater than the last one.
        fault: a signal, or `CUT`.
        count: the occurrence of the phase at which the fault strikes.

    Returns:
        The last version that was broadcast.
    """
    victim = job.explorers[VICTIM]
    victim.ask("arm", phase, fault, count)
    report = timed_broadcast(job, version)
    assert set(OTHERS) <= set(report.served), report
    # An explorer struck after its answer is lost afterwards; one cut off then has the version,
    # though its answer may be lost.
    if phase != "acknowledged":
        assert VICTIM in report.lost, report
    for name in OTHERS:
        assert job.explorers[name].ask("version") == version
    job.check(*OTHERS)

    version += 1  # the survivors continue without the lost explorer
    report = timed_broadcast(job, version)
    assert set(OTHERS) <= set(report.served), report
    assert VICTIM not in report.served, report
    if job.group:
        assert report.group == OTHERS, "the survivors are no new group"

    if fault == signal.SIGSTOP:  # the resumed explorer finds that its group has ended
        victim.signal(signal.SIGCONT)
    elif fault == CUT:
        job.spaces[VICTIM].mend()
    else:
        victim.end()
        victim = job.join(VICTIM)
    assert job.trainer.ask("wait_for", 3, 30.0), job.trainer.ask("quarantined")
    job.trainer.ask("catch_up", version)
    assert victim.ask("wait_newer", version - 1, 30.0) == version
    assert job.check() > 0
    return version
