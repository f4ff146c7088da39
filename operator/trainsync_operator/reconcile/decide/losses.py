"""Lost trainers' pods, for which a job may get others; pure.

A pod shows for a moment why it ended. So the loss is remembered in the status until the job has
gone on in other pods, or the attempt ends.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainsync.api.base import format_time
from trainsync.api.failure_policy import FailureClass
from trainsync.api.spec import Role
from trainsync.api.status import LONGEST_FAILURE, MOST_EXITS, ContainerExit, TrainerLoss, bounded

from trainsync_operator.kube import objects
from trainsync_operator.reconcile.decide import startup
from trainsync_operator.reconcile.observed import NODE_NOT_READY, Observed, Pod
from trainsync_operator.reconcile.run import Run, State

_OOM_KILLED: Final = "OOMKilled"


@dataclass(frozen=True)
class Missing:
    """Trainers' pods that the job has lost; ``message`` says how many, and how they ended.

    ``exits`` are of their containers that failed, by name.
    """

    count: int
    message: str
    exits: tuple[tuple[str, int], ...] = ()


def in_use_since(run: Run, started: datetime, now: datetime) -> datetime:
    """Pods that are not younger than this are those of the job that ``started`` then.

    A restart in place takes the pods that are there. Where it is not known when that was, they are
    all the job's if the job may get others.
    """
    restarts = run.status.get("restartsInPlace") or {}
    at = objects.optional_time(restarts.get("time"))
    if at is None and restarts.get("count") and run.spec.failure_policy.pod_replacement_seconds:
        at = now
    return started if at is None else max(started, at)


def missing(run: Run, state: State, observed: Observed, in_use: datetime) -> Missing | None:
    """None when the job has all of its trainers' pods."""
    cluster = run.trainer_cluster
    group = next(group for group in cluster.groups if group.role is Role.TRAINER)
    original = [
        pod
        for pod in observed.pods_of(state.cluster_attempt)
        if pod.cluster == cluster.name and pod.group == group.name and pod.created <= in_use
    ]
    count = group.replicas - sum(1 for pod in original if pod.alive)
    if count <= 0:
        return None
    message = (
        f"{count} of {group.replicas} trainer pods of cluster {cluster.name}"
        f" (group {group.name}) were lost.{ends(original)}"
    )
    exits = tuple(found for pod in original if not pod.alive for found in pod.exits)
    return Missing(count, message, exits[:MOST_EXITS])


def ends(pods: list[Pod]) -> str:
    """How pods ended, and the last lines of the first."""
    ended = [pod for pod in pods if pod.ended]
    told = "".join(f" Pod {pod.name} ended: {pod.ended}." for pod in ended)
    return told + next((startup.last_lines(pod) for pod in ended if pod.last_words), "")


def taken_by_infrastructure(state: State, observed: Observed, in_use: datetime) -> str | None:
    """The first pod of the job that was evicted, preempted or lost with its node.

    The pod is seen while it ends. An explorer's counts too: the job may have failed of the loss.
    """
    return next(
        (
            f"Pod {pod.name}: {pod.disruption}."
            for pod in observed.pods_of(state.cluster_attempt)
            if pod.disruption
            and pod.created <= in_use
            # Of an eviction that is asked for alone nothing has failed yet.
            and (not pod.alive or pod.disruption == NODE_NOT_READY)
        ),
        None,
    )


def killed_for_memory(state: State, observed: Observed, in_use: datetime) -> bool:
    """Whether a container of the job's pods was killed for its memory, an explorer's too."""
    return any(
        pod.ended and pod.ended.startswith(_OOM_KILLED) and pod.created <= in_use
        for pod in observed.pods_of(state.cluster_attempt)
    )


def remembered(run: Run, state: State, observed: Observed, now: datetime) -> TrainerLoss | None:
    """The loss for which the job waits, as the status is to have it; None: there is none.

    Before trainers have trained there is none: the job may still place its ranks anywhere.
    """
    jobs = observed.jobs_of(state.attempt)
    if not jobs:
        return None
    started = max(job.created for job in jobs)
    in_use = in_use_since(run, started, now)
    found = missing(run, state, observed, in_use)
    if found is None:
        return None
    before = state.trainer_loss
    if before is not None and before.attempt != state.attempt:
        before = None
    waits = run.spec.failure_policy.pod_replacement_seconds and run.reported_since(started)
    if before is None and not waits:
        return None
    taken = taken_by_infrastructure(state, observed, in_use)
    seen = TrainerLoss(
        attempt=state.attempt,
        time=now,
        pods=found.count,
        failure_class=seen_class(state, observed, in_use),
        message=bounded(f"{taken} {found.message}" if taken else found.message, LONGEST_FAILURE),
        exits=[ContainerExit(container_name=name, exit_code=code) for name, code in found.exits],
    )
    return seen if before is None else _together(before, seen)


def _together(before: TrainerLoss, seen: TrainerLoss) -> TrainerLoss:
    """What is seen of a loss that is known."""
    failure_class = explains_more(seen.failure_class, before.failure_class)
    message = before.message
    if failure_class != before.failure_class:
        message = seen.message
    elif seen.pods > before.pods:
        message = bounded(f"{before.message} {seen.message}", LONGEST_FAILURE)
    exits = before.exits + [new for new in seen.exits if new not in before.exits]
    return TrainerLoss(
        attempt=before.attempt,
        time=before.time,
        pods=max(before.pods, seen.pods),
        failure_class=failure_class,
        message=message,
        exits=exits[:MOST_EXITS],
    )


def seen_class(state: State, observed: Observed, in_use: datetime) -> FailureClass:
    """What the loss of a pod is put down to, by the pods that are seen now."""
    if taken_by_infrastructure(state, observed, in_use):
        return FailureClass.INFRASTRUCTURE
    if killed_for_memory(state, observed, in_use):
        return FailureClass.OUT_OF_MEMORY
    return FailureClass.APPLICATION


def explains_more(one: FailureClass, other: FailureClass) -> FailureClass:
    """The one that explains more."""
    order = (FailureClass.APPLICATION, FailureClass.OUT_OF_MEMORY, FailureClass.INFRASTRUCTURE)
    return max(one, other, key=order.index)


def told(run: Run, loss: TrainerLoss) -> str:
    """The loss, and until when the job may go on, for people."""
    until = format_time(over(run, loss))
    return f"{loss.message} The job may go on in another pod until {until}."


def over(run: Run, loss: TrainerLoss) -> datetime:
    """When the job's time for another pod ends."""
    return loss.time + timedelta(seconds=run.spec.failure_policy.pod_replacement_seconds)
