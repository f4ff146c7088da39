"""Decides a run's next transition from its state, its children and the time; pure."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from trainsync.api.spec import RestartScope

from trainsync_operator.reconcile import failures, startup
from trainsync_operator.reconcile.failures import Cause, Reason
from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.run import Outcome, Run, State

MAX_BACKOFF: Final = timedelta(minutes=10)
# The names of children have room for three digits.
MAX_ATTEMPT: Final = 999


class Transition(StrEnum):
    """A transition of the run, posted as an Event."""

    BEGIN = "Created"
    SUSPEND = "Suspended"
    RESUME = "Resumed"
    RESTART = "Restarting"
    COMPLETE = "Complete"
    FAIL = "Failed"


@dataclass(frozen=True)
class Decision:
    """The run's next state; without a transition, the present state."""

    state: State
    transition: Transition | None = None
    message: str = ""
    warning: bool = False
    # Why the previous attempt ended, if it failed or was preempted.
    cause: Reason | None = None
    # Times at which to decide again without an event.
    due: tuple[datetime, ...] = ()


def backoff(run: Run, restarts: int) -> timedelta:
    """The back-off before restart number ``restarts`` (from 0): doubled each time, bounded."""
    base = timedelta(seconds=run.spec.failure_policy.backoff_seconds)
    wait: timedelta = base * 2 ** min(restarts, 20)
    return min(wait, MAX_BACKOFF)


def _finish(state: State, now: datetime, outcome: Outcome) -> Decision:
    done = replace(
        state,
        outcome=outcome,
        completion_time=now,
        next_attempt_time=None,
        starting_since=None,
    )
    transition = Transition.COMPLETE if outcome.succeeded else Transition.FAIL
    return Decision(done, transition, outcome.message, warning=not outcome.succeeded)


def _fail(state: State, now: datetime, reason: str, message: str) -> Decision:
    return _finish(state, now, Outcome(succeeded=False, reason=reason, message=message))


def _restart(run: Run, state: State, cause: Cause, now: datetime) -> Decision:
    limit = run.spec.failure_policy.max_restarts
    if cause.hopeless:
        return replace(_fail(state, now, cause.reason, cause.message), cause=cause.reason)
    if cause.counted and state.restarts >= limit:
        message = (
            f"Attempt {state.attempt} failed and none of {limit} restarts is left"
            f" (spec.failurePolicy.maxRestarts). {cause.message}"
        )
        return replace(_fail(state, now, "MaxRestartsExceeded", message), cause=cause.reason)
    attempt = state.attempt + 1
    if attempt > MAX_ATTEMPT:
        message = f"No attempt after number {MAX_ATTEMPT} is possible: make a new TrainingRun."
        return replace(_fail(state, now, "AttemptsExhausted", message), cause=cause.reason)
    wait = backoff(run, state.restarts) if cause.counted else timedelta(0)
    wide = cause.scope is RestartScope.CLUSTER
    after = replace(
        state,
        attempt=attempt,
        cluster_attempt=attempt if wide else state.cluster_attempt,
        restarts=state.restarts + (1 if cause.counted else 0),
        next_attempt_time=now + wait if wait else None,
        starting_since=None,
    )
    what = "the job on new RayClusters" if wide else "the job"
    message = (
        f"Attempt {state.attempt} ended ({cause.reason}). {cause.message}"
        f" Attempt {attempt} runs {what}, in {int(wait.total_seconds())} s."
    )
    return Decision(after, Transition.RESTART, message, warning=cause.counted, cause=cause.reason)


def _resume(state: State, now: datetime) -> Decision:
    if state.start_time is None:  # suspended before the first attempt
        after = replace(state, suspended=False, start_time=now)
    else:
        attempt = state.attempt + 1
        after = replace(state, suspended=False, attempt=attempt, cluster_attempt=attempt)
    return Decision(after, Transition.RESUME, f"Attempt {after.attempt} starts on new RayClusters.")


def _begin(run: Run, observed: Observed, now: datetime) -> State:
    """The first state; read from the children's labels if the status was wiped."""
    clusters = max((ray.attempt for ray in observed.ray_clusters), default=0)
    jobs = max((job.attempt for job in observed.jobs), default=0)
    suspended = run.spec.suspend
    return State(
        begun=True,
        attempt=max(clusters, jobs),
        cluster_attempt=clusters,
        suspended=suspended,
        start_time=None if suspended else now,
    )


def succeeded(run: Run, state: State, observed: Observed) -> bool:
    """Whether the trainer's job has succeeded; the jobs of other clusters serve this job."""
    return any(
        job.cluster == run.trainer_cluster.name and job.phase is JobPhase.SUCCEEDED
        for job in observed.jobs_of(state.attempt)
    )


def decide(run: Run, state: State, observed: Observed, now: datetime) -> Decision:
    """The next transition of a run, at most one at a time."""
    if state.outcome is not None:
        return Decision(state)
    if not state.begun:
        return Decision(_begin(run, observed, now), Transition.BEGIN, "The run was taken up.")
    if not state.suspended and succeeded(run, state, observed):
        message = f"The job of attempt {state.attempt} succeeded."
        return _finish(state, now, Outcome(True, "JobSucceeded", message))
    if run.spec.suspend:
        if state.suspended:
            return Decision(state)
        after = replace(state, suspended=True, next_attempt_time=None, starting_since=None)
        return Decision(after, Transition.SUSPEND, "Jobs and RayClusters are deleted.")
    if state.suspended:
        return _resume(state, now)
    state = replace(state, starting_since=startup.since(run, state, observed, now))
    findings = failures.find(run, state, observed, now)
    if findings.causes:
        return _restart(run, state, failures.combined(findings.causes), now)
    return Decision(state, due=tuple(findings.due))
