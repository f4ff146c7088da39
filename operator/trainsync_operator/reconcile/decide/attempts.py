"""Decides a run's next transition from its state, its children and the time; pure."""

import hashlib
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from trainsync.api.failure_policy import FailureAction, FailureClass, RestartScope
from trainsync.api.spec import RetentionPolicy
from trainsync.api.status import LONGEST_FAILURE, LastFailure, StopReason, bounded

from trainsync_operator.reconcile.decide import (
    failure_rules,
    failures,
    hindsight,
    losses,
    startup,
    stopping,
)
from trainsync_operator.reconcile.decide.failures import Cause, Reason
from trainsync_operator.reconcile.decide.stopping import Over, StopOutcome
from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.run import Outcome, Run, State

MAX_BACKOFF: Final = timedelta(minutes=10)
# The largest part of a back-off that is left out.
JITTER: Final = 0.2
# The names of children have room for three digits.
MAX_ATTEMPT: Final = 999


class Transition(StrEnum):
    """A transition of the run, posted as an Event."""

    BEGIN = "Created"
    STOP = "Suspending"
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
    # None where the end was no failure.
    failure_class: FailureClass | None = None
    # How the wait for a save ended, if one did.
    stop_outcome: StopOutcome | None = None
    # Times at which to decide again without an event.
    due: tuple[datetime, ...] = ()


def backoff(run: Run, restarts: int) -> timedelta:
    """The back-off before restart number ``restarts`` (from 0), in whole seconds.

    Doubled each time and bounded; up to `JITTER` of it is left out, so that runs that failed
    together (of one node, or one quota) do not restart together. The part depends on the run and
    the number alone: deciding again, after a write that was refused, gives the same time.
    """
    base = run.spec.failure_policy.backoff_seconds
    longest = min(base * 2 ** min(restarts, 20), int(MAX_BACKOFF.total_seconds()))
    digest = hashlib.sha256(f"{run.uid}/{restarts}".encode()).digest()
    part = int.from_bytes(digest[:8]) / 2**64
    return timedelta(seconds=round(longest * (1 - JITTER * part)))


def _finish(state: State, now: datetime, outcome: Outcome) -> Decision:
    done = replace(
        state,
        outcome=outcome,
        completion_time=now,
        next_attempt_time=None,
        starting_since=None,
        trainer_loss=None,
        suspended_since=None,
        stopping=None,
    )
    transition = Transition.COMPLETE if outcome.succeeded else Transition.FAIL
    return Decision(done, transition, outcome.message, warning=not outcome.succeeded)


def _fail(run: Run, state: State, now: datetime, reason: str, message: str) -> Decision:
    told = f"{message} {_how_to_go_on(run)}"
    failed = _finish(state, now, Outcome(succeeded=False, reason=reason, message=told))
    return replace(failed, message=message)


def _how_to_go_on(run: Run) -> str:
    template = run.spec.checkpoint.storage.volume_claim_template
    if template is None or template.retention_policy is RetentionPolicy.RETAIN:
        return (
            "To go on from the last checkpoint: mend the cause, delete the run, and apply it again"
            " under the same name."
        )
    return (
        "To go on from the last checkpoint: mend the cause, set retentionPolicy of"
        " volumeClaimTemplate to Retain, delete the run, and apply it again under the same name."
    )


def _restart(run: Run, state: State, cause: Cause, now: datetime) -> Decision:
    failed = replace(state, last_failure=_failure(state, cause, now)) if cause.counted else state
    decision = _after_failure(run, failed, cause, now)
    failure_class = cause.failure_class if cause.counted else None
    return replace(decision, cause=cause.reason, failure_class=failure_class)


def _failure(state: State, cause: Cause, now: datetime) -> LastFailure:
    return LastFailure(
        attempt=state.attempt,
        failure_class=cause.failure_class,
        reason=str(cause.reason),
        message=bounded(cause.message, LONGEST_FAILURE),
        time=now,
    )


def _counted(run: Run, state: State, cause: Cause) -> tuple[int, State, int, str]:
    """Restarts so far of the cause's class, the state with one more, the limit and its field."""
    policy = run.spec.failure_policy
    if cause.failure_class is FailureClass.INFRASTRUCTURE:
        count = state.infrastructure_restarts
        more = replace(state, infrastructure_restarts=count + 1)
        return count, more, policy.max_infrastructure_restarts, "maxInfrastructureRestarts"
    more = replace(state, restarts=state.restarts + 1)
    return state.restarts, more, policy.max_restarts, "maxRestarts"


def _after_failure(run: Run, state: State, cause: Cause, now: datetime) -> Decision:
    if cause.hopeless:
        return _fail(run, state, now, cause.reason, cause.message)
    index, rule = failure_rules.first(run.spec.failure_policy.rules, cause) or (0, None)
    action = rule.action if rule else FailureAction.RESTART
    if action is FailureAction.FAIL:
        message = f"spec.failurePolicy.rules[{index}] fails the run. {cause.message}"
        return _fail(run, state, now, "FailedByRule", message)
    counted = cause.counted and action is not FailureAction.IGNORE
    count, more, limit, field = _counted(run, state, cause)
    if counted and count >= limit:
        message = (
            f"Attempt {state.attempt} failed and none of {limit} restarts is left"
            f" (spec.failurePolicy.{field}). {cause.message}"
        )
        return _fail(run, state, now, f"{field[0].upper()}{field[1:]}Exceeded", message)
    attempt = state.attempt + 1
    if attempt > MAX_ATTEMPT:
        return _exhausted(run, state, now)
    # A failure that is ignored comes again perhaps: its wait grows with the attempts.
    number = count if counted else state.attempt
    wait = backoff(run, number) if cause.counted else timedelta(0)
    wide = cause.scope is RestartScope.CLUSTER or action is FailureAction.RESTART_CLUSTER
    after = replace(
        more if counted else state,
        attempt=attempt,
        cluster_attempt=attempt if wide else state.cluster_attempt,
        next_attempt_time=now + wait if wait else None,
        starting_since=None,
        trainer_loss=None,
        stopping=None,
    )
    ruled = f" spec.failurePolicy.rules[{index}]: {action}." if rule else ""
    what = "the job on new RayClusters" if wide else "the job"
    message = (
        f"Attempt {state.attempt} ended ({cause.reason}). {cause.message}{ruled}"
        f" Attempt {attempt} runs {what}, in {int(wait.total_seconds())} s."
    )
    return Decision(after, Transition.RESTART, message, warning=cause.counted)


def _ask(
    run: Run, state: State, observed: Observed, now: datetime, reason: StopReason
) -> Decision | None:
    request = stopping.begin(run, state, observed, now, reason)
    if request is None:
        return None
    message = stopping.describe(run, request)
    return Decision(replace(state, stopping=request), Transition.STOP, message)


def _suspend(run: Run, state: State, observed: Observed, now: datetime) -> Decision:
    """Ask for a save, wait for it, then give up jobs and RayClusters."""
    if state.suspended:
        return Decision(state)
    ended: Over | None = None
    if state.stopping is None:
        asked = _ask(run, state, observed, now, StopReason.SUSPEND)
        if asked is not None:
            return asked
    else:
        ended = stopping.over(run, state, observed, now, state.stopping)
        if ended is None:
            return Decision(state, due=(stopping.ends(run, state.stopping),))
    after = replace(
        state,
        suspended=True,
        suspended_since=now,
        next_attempt_time=None,
        starting_since=None,
        trainer_loss=None,
        stopping=None,
    )
    message = "Jobs and RayClusters are deleted."
    if ended is None:
        return Decision(after, Transition.SUSPEND, message)
    lost = ended.outcome is not StopOutcome.SAVED
    message = f"{ended.message} {message}"
    return Decision(after, Transition.SUSPEND, message, warning=lost, stop_outcome=ended.outcome)


def _exhausted(run: Run, state: State, now: datetime) -> Decision:
    message = f"No attempt after number {MAX_ATTEMPT} is possible: make a new TrainingRun."
    return _fail(run, state, now, "AttemptsExhausted", message)


def _resume(run: Run, state: State, now: datetime) -> Decision:
    awake = replace(state, suspended=False, suspended_since=None)
    if state.start_time is None:  # suspended before the first attempt
        after = replace(awake, start_time=now, active_since=now)
    else:
        attempt = state.attempt + 1
        if attempt > MAX_ATTEMPT:
            return _exhausted(run, state, now)
        since = state.active_since
        if since and state.suspended_since:
            since += now - state.suspended_since
        after = replace(awake, attempt=attempt, cluster_attempt=attempt, active_since=since)
    return Decision(after, Transition.RESUME, f"Attempt {after.attempt} starts on new RayClusters.")


def _deadline(run: Run, state: State) -> datetime | None:
    limit = run.spec.failure_policy.active_deadline_seconds
    if limit is None or state.active_since is None:
        return None
    return state.active_since + timedelta(seconds=limit)


def _too_late(run: Run, state: State, now: datetime) -> Decision:
    message = (
        f"The run has not finished within {run.spec.failure_policy.active_deadline_seconds} s"
        " (spec.failurePolicy.activeDeadlineSeconds)."
    )
    cause = Cause(Reason.DEADLINE_EXCEEDED, message, RestartScope.JOB)
    failed = replace(state, last_failure=_failure(state, cause, now))
    ended = _fail(run, failed, now, cause.reason, message)
    return replace(ended, cause=cause.reason, failure_class=cause.failure_class)


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
        suspended_since=now if suspended else None,
        start_time=None if suspended else now,
        active_since=None if suspended else now,
    )


def succeeded(run: Run, state: State, observed: Observed) -> bool:
    """Whether the trainer's job has succeeded; the jobs of other clusters serve this job."""
    return any(
        job.cluster == run.trainer_cluster.name and job.phase is JobPhase.SUCCEEDED
        for job in observed.jobs_of(state.attempt)
    )


def decide(
    run: Run, state: State, observed: Observed, now: datetime, *, edits: bool = True
) -> Decision:
    """The next transition of a run, at most one at a time.

    Args:
        edits: whether an edit of the spec may end the attempt.
    """
    if state.outcome is not None:
        return Decision(state)
    if not state.begun:
        return Decision(_begin(run, observed, now), Transition.BEGIN, "The run was taken up.")
    if not state.suspended and succeeded(run, state, observed):
        message = f"The job of attempt {state.attempt} succeeded."
        return _finish(state, now, Outcome(True, "JobSucceeded", message))
    if run.spec.suspend:
        return _suspend(run, state, observed, now)
    if state.suspended:
        return _resume(run, state, now)
    asked = state.stopping
    if asked is not None and asked.reason is StopReason.SUSPEND:
        message = f"spec.suspend is false again: attempt {state.attempt} goes on."
        return Decision(replace(state, stopping=None), Transition.RESUME, message)
    ended: Over | None = None
    if asked is not None:
        ended = stopping.over(run, state, observed, now, asked)
        if ended is None:
            return Decision(state, due=(stopping.ends(run, asked),))
        state = replace(state, stopping=None)
    deadline = _deadline(run, state)
    if deadline is not None and now >= deadline:
        return _too_late(run, state, now)
    state = hindsight.put_right(run, state, observed, now)
    state = replace(
        state,
        starting_since=startup.since(run, state, observed, now),
        trainer_loss=losses.remembered(run, state, observed, now),
    )
    findings = failures.find(run, state, observed, now, edits=edits)
    if findings.causes:
        cause = failures.combined(findings.causes)
        if cause.reason is Reason.PREEMPTED and asked is None:
            wait = _ask(run, state, observed, now, StopReason.PREEMPTION)
            if wait is not None:
                return wait
        if ended is None:
            decision = _restart(run, state, cause, now)
            until = hindsight.reclassify_until(state, observed, cause, now)
            if decision.transition is not Transition.FAIL or until is None:
                return decision
            of_node = replace(cause, failure_class=FailureClass.INFRASTRUCTURE)
            ends = _restart(run, state, of_node, now).transition is Transition.FAIL
            return decision if ends else Decision(state, due=(until,))
        if asked is not None and cause.counted:
            # Its queue has admitted it again before this was seen: what it lost is no failure.
            cause = replace(cause, reason=Reason.PREEMPTED, counted=False, hopeless=False)
        cause = replace(cause, message=f"{cause.message} {ended.message}")
        return replace(_restart(run, state, cause, now), stop_outcome=ended.outcome)
    due = findings.due if deadline is None else [*findings.due, deadline]
    return Decision(state, due=tuple(due))
