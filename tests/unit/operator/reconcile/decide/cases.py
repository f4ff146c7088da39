"""States and children on which attempts are decided."""

from dataclasses import replace

from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.run import State

from tests.unit.operator.support import START, healthy, job, pod, pods, ray_cluster, seconds, spec

RUNNING = State(begun=True, start_time=START, active_since=START)
NOW = START + seconds(100)


def policy(**changes: object) -> dict[str, object]:
    return spec(failurePolicy=changes)


def lost(role: str, number: int, **changes: object) -> Observed:
    """A job that runs, and one pod that has ended."""
    gone = pod(role, number, alive=False, **changes)
    others = tuple(p for p in pods() if p.name != gone.name)
    return healthy((job(JobPhase.RUNNING),), pods=(gone, *others))


def failed(observed: Observed) -> Observed:
    return replace(observed, jobs=(job(JobPhase.FAILED, message="actor died"),))


PREEMPTED = {"disruption": "PreemptionByScheduler"}
SILENT = {"disruption": "NodeNotReady"}


def with_silent(role: str, observed: Observed) -> Observed:
    """One pod, which Kubernetes still calls running, is on a node that is lost."""
    hidden = [replace(p, ready=False, **SILENT) if p.role == role else p for p in observed.pods]
    return replace(observed, pods=tuple(hidden))


HEAD_UNREADY = healthy(
    (job(JobPhase.RUNNING),), ray_clusters=(ray_cluster(head_ready=False, head_ready_since=START),)
)
