"""Puts a failure down to a node whose loss becomes known only after it; pure.

Ray notices a silent node within half a minute and fails the job; Kubernetes marks the node later,
when the next attempt has begun already. A failure that would end the run waits for that mark.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from trainsync.api.failure_policy import FailureAction, FailureClass
from trainsync.api.status import LONGEST_FAILURE, bounded

from trainsync_operator.reconcile.decide.failures import BY_A_LOST_POD, Cause, Reason
from trainsync_operator.reconcile.observed import NODE_NOT_READY, JobPhase, Observed
from trainsync_operator.reconcile.run import Run, State

# Kubernetes marks a silent node after 50 s; pods are evicted from it 30 s later.
KNOWN_WITHIN: Final = timedelta(minutes=3)
MARKED_WITHIN: Final = timedelta(seconds=60)
"""How long a failure that would end the run waits for the mark, from the job's end."""
_NODE_LOST: Final = (NODE_NOT_READY, "DeletionByTaintManager", "NodeLost")


def put_right(run: Run, state: State, observed: Observed, now: datetime) -> State:
    """The state, in which the failure before this attempt counts for the infrastructure if a pod
    of then is on a node that is lost now, and nothing has been trained since."""
    failure, policy = state.last_failure, run.spec.failure_policy
    if failure is None or failure.attempt != state.attempt - 1 or now > failure.time + KNOWN_WITHIN:
        return state
    if failure.failure_class is not FailureClass.APPLICATION or failure.reason not in BY_A_LOST_POD:
        return state
    if state.restarts == 0 or state.infrastructure_restarts >= policy.max_infrastructure_restarts:
        return state
    if any(rule.action is FailureAction.IGNORE for rule in policy.rules):
        return state  # it may never have been counted
    if run.last_report is not None and run.last_report > failure.time:
        return state
    lost = [p for p in observed.pods if p.disruption in _NODE_LOST and p.created <= failure.time]
    if not lost:
        return state
    message = f"Pod {lost[0].name}: {lost[0].disruption}. {failure.message}"
    changes = {
        "failure_class": FailureClass.INFRASTRUCTURE,
        "message": bounded(message, LONGEST_FAILURE),
    }
    return replace(
        state,
        restarts=state.restarts - 1,
        infrastructure_restarts=state.infrastructure_restarts + 1,
        last_failure=failure.model_copy(update=changes),
    )


def reclassify_until(
    state: State, observed: Observed, cause: Cause, now: datetime
) -> datetime | None:
    """Until when a failed job may be put down to a lost node; None where it cannot be.

    A job notices the loss of another node than its own alone, and a pod that has ended explains the
    failure.
    """
    if cause.reason is not Reason.JOB_FAILED or cause.failure_class is not FailureClass.APPLICATION:
        return None
    ends = [
        job.ended
        for job in observed.jobs_of(state.attempt)
        if job.phase is JobPhase.FAILED and job.ended is not None
    ]
    pods = observed.pods_of(state.cluster_attempt)
    nodes = {pod.node for pod in pods if pod.node}
    if not ends or len(nodes) < 2 or not all(pod.alive for pod in pods):
        return None
    until = max(ends) + MARKED_WITHIN
    return until if now < until else None
