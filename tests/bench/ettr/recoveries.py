"""How trainsync and its peers recover: which parts start again, and for how long.

What one machine can show is measured by the benchmark (`tests.bench.ettr.measured`). What needs a
cluster is here, each with its source.
"""

from dataclasses import replace
from typing import Final

from trainsync.api.failure_policy import FailurePolicy
from trainsync.runtime.attempt.restarts import _PAUSES
from trainsync.weights.synchronizer.state import LEASE_SECONDS
from trainsync_operator.reconcile.decide.attempts import MAX_BACKOFF

from tests.bench.ettr.model import Part, Recovery, Restarts, Way

# From the loss of a trainer's pod to the begin of the next job: tests/bench/README.md, "Figures
# that miss their goal, and peers", 2026-11-21, with a wait of a second or two.
JOB_AFTER_POD: Final = 17.0
# What a TrainingRun waits by default before each new job: twice as long each time, bounded.
BACKOFF: Final = tuple(
    min(FailurePolicy().backoff_seconds * 2.0**number, MAX_BACKOFF.total_seconds())
    for number in range(10)
)
# Pods leave a lost node after it: docs/trainingrun.md.
NODE_UNREACHABLE: Final = 30.0
# From the end of a step to the commit of 7.6 GB on an H100: tests/bench/README.md,
# "bench_checkpoint_gpu", 2026-11-26.
COMMIT: Final = 4.6
# Not measured: no step waits for the monitor, so hardly anything depends on it. The longest time
# after which a lost pod is replaced in the benchmark's table.
MONITOR: Final = 75.0

# RobustRL (see `tests.bench.ettr.schedule`), section 7.3: a rollout machine of a 32B model is
# scheduled (30 s), its container (30) and engine (49) start, and it gets weights (10).
EXPLORER: Final = 119.0
# The same, figure 15: "over 300 s" for the whole job, 1.5 to 1.7 times as long as for trainers.
ROBUSTRL_JOB: Final = 300.0
ROBUSTRL_TRAINERS: Final = ROBUSTRL_JOB / 1.6
# Section 7.4: from the memory to the disk.
ROBUSTRL_COMMIT: Final = 10.0
# Section 7.2: ByteRobust saves every fifth step.
BYTEROBUST_SAVE_EVERY: Final = 5


def trainsync(in_place: float, new_job: float) -> Recovery:
    """With a save after each step, and a pace that keeps batches.

    Args:
        in_place: seconds of a restart in place.
        new_job: seconds of a new job, from its begin.
    """
    pod = JOB_AFTER_POD + new_job
    return Recovery(
        {
            Part.TRAINER: Way(Restarts.TRAINERS, in_place, _PAUSES),
            Part.POD: Way(Restarts.JOB, pod, BACKOFF),
            Part.NODE: Way(Restarts.JOB, NODE_UNREACHABLE + pod, BACKOFF),
            Part.EXPLORER: Way(Restarts.PART, EXPLORER),
            Part.MONITOR: Way(Restarts.PART, MONITOR),
        },
        commit=COMMIT,
        lease=LEASE_SECONDS,
        keeps_batches=True,
    )


def with_way(recovery: Recovery, part: Part, way: Way) -> Recovery:
    """The same, but for one part."""
    return replace(recovery, ways={**recovery.ways, part: way})


def whole_job(new_job: float, commit: float = COMMIT) -> Recovery:
    """Whatever dies, a new job goes on from the last checkpoint on the disk."""
    return Recovery(
        {part: Way(Restarts.JOB, new_job) for part in Part},
        save_every=BYTEROBUST_SAVE_EVERY,
        commit=commit,
    )


def robustrl() -> Recovery:
    """RobustRL's restart of trainers, which keeps batches and the explorers' turns."""
    return Recovery(
        {Part.TRAINER: Way(Restarts.TRAINERS, ROBUSTRL_TRAINERS)},
        commit=ROBUSTRL_COMMIT,
        keeps_batches=True,
    )
