"""How an attempt starts: since when, and what its pods failed of; pure.

KubeRay makes a Ray pod that ends before the job anew at once, for ever, so that what it ended of
shows for a moment alone. It is remembered in the status.
"""

from datetime import datetime, timedelta
from typing import Final

from trainsync.api import names
from trainsync.api.spec import Cluster
from trainsync.api.status import ConditionType

from trainsync_operator.kube import objects
from trainsync_operator.reconcile.observed import NOT_STARTED, JobPhase, Observed, Pod
from trainsync_operator.reconcile.run import Run, State

DEADLINE: Final = timedelta(minutes=30)
_NO_IMAGE: Final = (
    "ErrImage",
    "ImagePullBackOff",
    "ImageInspectError",
    "InvalidImageName",
    "RegistryUnavailable",
)
QUEUED: Final = "Queued"
"""A run waits for its queue to admit a RayCluster: a reason of Ready, and what the table says."""
_NO_ROOM: Final = ("Unschedulable", "SchedulingGated")


def deadline(run: Run) -> timedelta:
    """How long an attempt may take until its job runs."""
    asked = run.spec.failure_policy.startup_deadline_seconds
    return DEADLINE if asked is None else timedelta(seconds=asked)


def since(run: Run, state: State, observed: Observed, now: datetime) -> datetime | None:
    """Since when the attempt starts; None while it does not, or waits for room.

    Waiting for room is the cluster's doing. It counts where the user has set a deadline.
    """
    if state.next_attempt_time and now < state.next_attempt_time:
        return None
    if _runs(run, state, observed):
        return None
    if run.spec.failure_policy.startup_deadline_seconds is None and _no_room(run, state, observed):
        return None
    return state.starting_since or now


def _runs(run: Run, state: State, observed: Observed) -> bool:
    return any(
        job.cluster == run.trainer_cluster.name and job.phase is not JobPhase.PENDING
        for job in observed.jobs_of(state.attempt)
        if not job.suspended
    )


def _no_room(run: Run, state: State, observed: Observed) -> bool:
    rays = [observed.ray_cluster(c.name, state.cluster_attempt) for c in run.spec.clusters]
    # Not made yet, or its pods cannot be: a quota, or another refusal.
    queued = any(ray is None or ray.suspended or ray.failure for ray in rays)
    pods = observed.pods_of(state.cluster_attempt)
    unscheduled = any(pod.problem and pod.problem.startswith(_NO_ROOM) for pod in pods)
    return queued or unscheduled or any(job.suspended for job in observed.jobs_of(state.attempt))


def _ended(pod: Pod) -> str:
    # Without its name: the next pod that ends in the same way says nothing new.
    which = f"A pod of group {pod.group}" if pod.group else "The head pod"
    return f"{which} of cluster {pod.cluster} ended: {pod.ended}."


def last_lines(pod: Pod) -> str:
    """The last lines of a pod that ended, as the end of a sentence; nothing where it left none."""
    return f" Its last lines: {pod.last_words}" if pod.last_words else ""


def pod_failure(run: Run, state: State, observed: Observed, cluster: Cluster) -> str | None:
    """How a pod of the cluster ended last, until the attempt's job runs."""
    if state.outcome is not None or state.suspended or _runs(run, state, observed):
        return None
    ray = observed.ray_cluster(cluster.name, state.cluster_attempt)
    if ray is not None and ray.suspended:
        return None  # its queue has ended them
    present = (p for p in observed.pods_of(state.cluster_attempt) if p.cluster == cluster.name)
    found = {_ended(pod): last_lines(pod) for pod in present if pod.ended}
    name = names.ray_cluster_name(run.name, cluster.name, state.cluster_attempt)
    entries = run.status.get("clusters") or []
    before: str | None = next(
        (entry.get("lastPodFailure") for entry in entries if entry.get("rayCluster") == name), None
    )
    if before and (not found or any(before.startswith(text) for text in found)):
        return before
    return next((text + found[text] for text in sorted(found)), None)


def pod_failures(run: Run, state: State, observed: Observed) -> str:
    """`pod_failure` of all clusters, one sentence each."""
    found = (pod_failure(run, state, observed, cluster) for cluster in run.spec.clusters)
    return " ".join(text for text in found if text)


def is_of_the_image(state: State, observed: Observed, failed: str) -> bool:
    """Whether an image cannot be pulled, or has not the command; ``failed``: `pod_failures`."""
    pods = observed.pods_of(state.cluster_attempt)
    pulled = not any(pod.problem and pod.problem.startswith(_NO_IMAGE) for pod in pods)
    return not pulled or any(f" ended: {word}" in failed for word in NOT_STARTED)


def problem_word(run: Run, state: State, observed: Observed) -> str | None:
    """The obstacle to the start of a pod, in the few words that a table has room for."""
    pods = observed.pods_of(state.cluster_attempt)
    problems = sorted(pod.problem for pod in pods if pod.problem)
    if problems:
        return problems[0].split(":")[0]
    failed = pod_failures(run, state, observed)
    if failed:
        return failed.split(" ended: ")[1].split(":")[0].split(".")[0]
    rays = [observed.ray_cluster(c.name, state.cluster_attempt) for c in run.spec.clusters]
    if state.stopping is None and any(ray is not None and ray.suspended for ray in rays):
        return QUEUED
    if any(ray is not None and ray.failure for ray in rays):
        return "ReplicaFailure"  # KubeRay's word: it cannot make pods, as of a quota
    if observed.monitor_problem and not observed.monitor_ready:
        return observed.monitor_problem.split(":")[0]
    if store_problem(run) is not None and not observed.monitor_ready:
        return names.STORE_FAILING
    return None


def store_problem(run: Run) -> str | None:
    """What the monitor says of the run's bucket, where that refuses."""
    found = objects.condition({"status": run.status}, ConditionType.CHECKPOINT_HEALTHY) or {}
    return found.get("message") if found.get("reason") == names.STORE_FAILING else None


def store_away_until(run: Run, now: datetime) -> datetime | None:
    """Until when the run's bucket may have been away: now, or its health's last change."""
    if run.spec.checkpoint.storage.object_store is None:
        return None
    if store_problem(run) is not None:
        return now
    found = objects.condition({"status": run.status}, ConditionType.CHECKPOINT_HEALTHY) or {}
    return objects.optional_time(found.get("lastTransitionTime"))
