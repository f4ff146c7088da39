"""A save before the pods go: when it is asked for, and how long it is waited for; pure.

The request stands in the run's status, where the run's monitor reads it and writes the answer.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from trainsync.api.status import StopReason, StopRequest, StopSave, StopSaveState

from trainsync_operator.builders.pod_template import ROLE_HEAD
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed
from trainsync_operator.reconcile.run import Run, State, readable


class StopOutcome(StrEnum):
    """How the wait for a save ended, in one word."""

    SAVED = "saved"
    FAILED = "failed"
    LATE = "late"
    JOB_ENDED = "job_ended"


# Loops such as verl's report only when they save.
_SILENT: Final = timedelta(minutes=2)


@dataclass(frozen=True)
class Over:
    """The wait is over: how, and in a sentence."""

    outcome: StopOutcome
    message: str


_WORDS: Final = {
    StopReason.SUSPEND: "The run is suspended",
    StopReason.PREEMPTION: "The run is preempted by its queue",
}


def _training(run: Run, state: State, observed: Observed) -> Job | None:
    """The trainer's job, while it can still save: it runs, and so do its head and trainers."""
    cluster = run.trainer_cluster
    jobs = (job for job in observed.jobs_of(state.attempt) if job.cluster == cluster.name)
    job = next(jobs, None)
    if job is None or job.deleting or job.phase is not JobPhase.RUNNING:
        return None
    pods = [p for p in observed.pods_of(state.cluster_attempt) if p.cluster == cluster.name]
    # A pod that is being deleted trains on while its preStop command holds it.
    living = [pod for pod in pods if pod.ended is None and pod.created <= job.created]
    heads = sum(1 for pod in living if pod.role == ROLE_HEAD)
    trainers = {g.name: g.replicas for g in cluster.groups if g.role == "Trainer"}
    whole = all(
        sum(1 for pod in living if pod.group == name) >= count for name, count in trainers.items()
    )
    return job if heads and whole else None


def begin(
    run: Run, state: State, observed: Observed, now: datetime, reason: StopReason
) -> StopRequest | None:
    """The request to make; None where nothing would be saved: the pods go at once.

    A young job that has reported no step has nothing to lose yet; an older one may report late.
    """
    seconds = run.spec.suspend_policy.save_deadline_seconds
    job = _training(run, state, observed)
    if not seconds or job is None or not observed.monitor_ready:
        return None
    if not run.reported_since(job.created) and now < job.created + _SILENT:
        return None
    return StopRequest(since=now, deadline=now + timedelta(seconds=seconds), reason=reason)


def answer(run: Run, stopping: StopRequest) -> StopSave | None:
    """The monitor's answer to this request."""
    found = (run.status.get("checkpoint") or {}).get("stopSave")
    saved = readable(StopSave, found, "status.checkpoint.stopSave")
    return saved if saved is not None and saved.since == stopping.since else None


def ends(run: Run, stopping: StopRequest) -> datetime:
    """When the pods go in any case: a deadline that was made shorter meanwhile holds at once."""
    limit = timedelta(seconds=run.spec.suspend_policy.save_deadline_seconds)
    return min(stopping.deadline, stopping.since + limit)


def over(
    run: Run, state: State, observed: Observed, now: datetime, stopping: StopRequest
) -> Over | None:
    """How the wait ended; None: it goes on."""
    saved = answer(run, stopping)
    if saved is not None and saved.state is StopSaveState.COMMITTED:
        message = f"Checkpoint {saved.step} is committed, and the run goes on from it."
        return Over(StopOutcome.SAVED, message)
    if saved is not None and saved.state is StopSaveState.FAILED:
        return Over(StopOutcome.FAILED, f"The save of step {saved.step} failed.{_last(run)}")
    if _training(run, state, observed) is None:
        message = f"The job or a pod of it ended before it had saved.{_last(run)}"
        return Over(StopOutcome.JOB_ENDED, message)
    deadline = ends(run, stopping)
    if now >= deadline:
        seconds = int((deadline - stopping.since).total_seconds())
        return Over(StopOutcome.LATE, f"No save was committed within {seconds} s.{_last(run)}")
    return None


def _last(run: Run) -> str:
    last = ((run.status.get("checkpoint") or {}).get("lastCommitted") or {}).get("step")
    return f" The run goes on from {'its beginning' if last is None else f'checkpoint {last}'}."


def describe(run: Run, stopping: StopRequest) -> str:
    """The reason for the wait, for the condition Ready; without values that change each second."""
    saved = answer(run, stopping)
    step = "the present step" if saved is None else f"step {saved.step}"
    seconds = int((stopping.deadline - stopping.since).total_seconds())
    until = stopping.deadline.strftime("%H:%M:%SZ")
    return (
        f"{_WORDS[stopping.reason]}: waits for a save of {step}, for {seconds} s at most, until"
        f" {until}."
    )
