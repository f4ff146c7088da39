"""The observed state of a run's children, read from objects without decisions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from trainsync.api import names
from trainsync.api.pods import gpus_of_containers

from trainsync_operator.builders.pod_template import ROLE_HEAD
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile import last_words
from trainsync_operator.reconcile.run import attempt_label


class JobPhase(StrEnum):
    """States of a RayJob; SUCCEEDED and all later ones are final."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"
    INVALID = "Invalid"


NOT_STARTED: Final = ("StartError", "ContainerCannotRun")
"""Reasons of containers that the runtime could not start."""
_SAID_LENGTH: Final = 300
# Reasons of pods that end for their node's sake, without a condition DisruptionTarget.
_OF_THE_NODE: Final = ("NodeLost", "NodeShutdown", "Preempting", "UnexpectedAdmissionError")
NODE_NOT_READY: Final = "NodeNotReady"
"""A disruption of a pod that may live still: the control plane hears nothing from its node."""
_FINAL: Final = {JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED, JobPhase.INVALID}
_JOB_STATUS_FINAL: Final = {
    "SUCCEEDED": JobPhase.SUCCEEDED,
    "FAILED": JobPhase.FAILED,
    "STOPPED": JobPhase.STOPPED,
}


@dataclass(frozen=True)
class Job:
    """A RayJob of the run."""

    name: str
    uid: str
    cluster: str
    attempt: int
    created: datetime
    deleting: bool
    phase: JobPhase
    status: str
    message: str
    # By Kueue, when the job was made.
    suspended: bool = False
    made_from: str | None = None
    # When KubeRay saw that it had ended.
    ended: datetime | None = None

    @property
    def finished(self) -> bool:
        """Whether its driver is known to be dead."""
        return self.phase in _FINAL


@dataclass(frozen=True)
class RayCluster:
    """A RayCluster of the run, read from its conditions; ``status.state`` is sticky and ignored."""

    name: str
    uid: str
    cluster: str
    attempt: int
    deleting: bool
    suspended: bool
    head_ready: bool
    head_ready_since: datetime | None
    lagging: bool
    failure: str | None
    head_service: str | None
    made_from: str | None = None


@dataclass(frozen=True)
class Pod:
    """A Ray pod of the run."""

    name: str
    uid: str
    cluster: str
    group: str | None
    role: str
    attempt: int
    created: datetime
    alive: bool
    ready: bool
    # Evicted from a node of which the control plane hears nothing: no kubelet ends the pod, but a
    # deletion without grace period, unless a finalizer holds it.
    stranded: bool
    deletion_deadline: datetime | None
    problem: str | None
    ended: str | None
    # Why the infrastructure took the pod, in one word of Kubernetes.
    disruption: str | None = None
    # The last lines of the container that ended.
    last_words: str | None = None
    # Containers that failed, with their exit codes.
    exits: tuple[tuple[str, int], ...] = ()
    # Of a pod that ends on its node, too: it has its GPUs until it is gone.
    held: bool = False
    waiting: bool = False
    gpus: int = 0
    node: str | None = None


@dataclass(frozen=True)
class Observed:
    """All children at one moment; ``live`` holds the raw objects, by kind and name."""

    ray_clusters: tuple[RayCluster, ...] = ()
    jobs: tuple[Job, ...] = ()
    pods: tuple[Pod, ...] = ()
    monitor_ready: bool = False
    monitor_problem: str | None = None
    # What keeps a pod of an entry of spec.servers from starting.
    server_problems: dict[str, str] = field(default_factory=dict)
    # Of all entries of spec.servers.
    server_pods: tuple[Object, ...] = ()
    # Whether the operator is to make LeaderWorkerSets.
    makes_groups: bool = False
    live: dict[tuple[Kind, str], Object] = field(default_factory=dict)

    def jobs_of(self, attempt: int) -> tuple[Job, ...]:
        """The jobs of one attempt, one for each cluster with an entrypoint."""
        return tuple(job for job in self.jobs if job.attempt == attempt)

    def ray_cluster(self, cluster: str, cluster_attempt: int) -> RayCluster | None:
        """The RayCluster of an entry of spec.clusters."""
        for found in self.ray_clusters:
            if (found.cluster, found.attempt) == (cluster, cluster_attempt):
                return found
        return None

    def pods_of(self, cluster_attempt: int) -> tuple[Pod, ...]:
        """The pods of one generation of RayClusters."""
        return tuple(pod for pod in self.pods if pod.attempt == cluster_attempt)


def _job_phase(status: dict[str, Any]) -> JobPhase:
    deployment = status.get("jobDeploymentStatus") or ""
    if deployment == "ValidationFailed":
        return JobPhase.INVALID
    if deployment in ("Failed", "Complete"):
        return _JOB_STATUS_FINAL.get(status.get("jobStatus") or "", JobPhase.FAILED)
    return JobPhase.RUNNING if status.get("jobStatus") == "RUNNING" else JobPhase.PENDING


def _job_message(obj: Object, pods: Iterable[Object]) -> str:
    message = str(objects.status(obj).get("message") or "")
    if _job_phase(objects.status(obj)) not in (JobPhase.FAILED, JobPhase.STOPPED):
        return " ".join(message.split())  # KubeRay's own words
    secrets = last_words.secrets_of_job((obj.get("spec") or {}).get("runtimeEnvYAML") or "")
    for pod in pods:
        secrets |= last_words.secrets_of(pod)
    return last_words.of_job(message, secrets)


def read_job(obj: Object, pods: Iterable[Object] = ()) -> Job:
    """A RayJob's facts; the secrets of ``pods`` are kept out of its message."""
    status, meta = objects.status(obj), objects.metadata(obj)
    said = status.get("jobStatus") or status.get("jobDeploymentStatus") or "Waiting"
    return Job(
        name=meta["name"],
        uid=meta["uid"],
        cluster=objects.labels(obj).get(names.LABEL_CLUSTER, ""),
        attempt=attempt_label(obj),
        created=objects.created(obj),
        deleting=objects.being_deleted(obj),
        phase=_job_phase(status),
        status=said,
        message=_job_message(obj, pods),
        suspended=bool((obj.get("spec") or {}).get("suspend")),
        made_from=objects.annotations(obj).get(names.ANNOTATION_MADE_FROM),
        ended=objects.optional_time(status.get("endTime")),
    )


def read_ray_cluster(obj: Object) -> RayCluster:
    """A RayCluster's facts."""
    status, meta = objects.status(obj), objects.metadata(obj)
    head = objects.condition(obj, "HeadPodReady")
    failure = objects.condition(obj, "ReplicaFailure")
    failed = failure is not None and failure.get("status") == "True"
    return RayCluster(
        name=meta["name"],
        uid=meta["uid"],
        cluster=objects.labels(obj).get(names.LABEL_CLUSTER, ""),
        attempt=attempt_label(obj),
        deleting=objects.being_deleted(obj),
        suspended=bool((obj.get("spec") or {}).get("suspend")),
        head_ready=head is not None and head.get("status") == "True",
        head_ready_since=objects.optional_time((head or {}).get("lastTransitionTime")),
        lagging=status.get("observedGeneration") != meta.get("generation"),
        failure=failure.get("message") if failure and failed else None,
        head_service=(status.get("head") or {}).get("serviceName"),
        made_from=objects.annotations(obj).get(names.ANNOTATION_MADE_FROM),
    )


def _container_problem(obj: Object) -> str | None:
    status = objects.status(obj)
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or []:
            waiting = (container.get("state") or {}).get("waiting") or {}
            reason = waiting.get("reason")
            if reason and reason not in ("PodInitializing", "ContainerCreating"):
                before = (container.get("lastState") or {}).get("terminated") or {}
                words = _last_words(before, obj)
                said = f" Its last lines: {words}" if words else ""
                return f"{reason}: {waiting.get('message', '')}".rstrip(": ") + said
    for entry in status.get("conditions") or []:
        if entry.get("type") == "PodScheduled" and entry.get("status") == "False":
            return f"{entry.get('reason', 'Unscheduled')}: {entry.get('message', '')}"
    return None


def _end(obj: Object) -> tuple[str | None, str | None]:
    """How the Ray container or its pod ended, None while it has not; and its last lines."""
    containers = (obj.get("spec") or {}).get("containers") or [{}]
    first = containers[0].get("name")
    for entry in objects.status(obj).get("containerStatuses") or []:
        terminated = (entry.get("state") or {}).get("terminated")
        if entry.get("name") == first and terminated is not None:
            return _told(terminated), _last_words(terminated, obj)
    if objects.status(obj).get("phase") == "Failed":
        for entry in objects.status(obj).get("initContainerStatuses") or []:
            terminated = (entry.get("state") or {}).get("terminated") or {}
            if terminated.get("exitCode"):
                told = f"init container {entry.get('name')}: {_told(terminated)}"
                return told, _last_words(terminated, obj)
        return objects.status(obj).get("reason"), None
    return None, None


def _last_words(terminated: dict[str, Any], obj: Object) -> str | None:
    return None if terminated.get("reason") in NOT_STARTED else last_words.of(terminated, obj)


def _told(terminated: dict[str, Any]) -> str:
    reason = terminated.get("reason", "Error")
    text = f"{reason}, exit code {terminated.get('exitCode')}"
    # What the container runtime says, the same for each pod that is made anew.
    said = terminated.get("message", "") if reason in NOT_STARTED else ""
    return f"{text}: {' '.join(said.split())[:_SAID_LENGTH]}" if said else text


def _exits(status: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    entries = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    ended = ((e.get("name", ""), (e.get("state") or {}).get("terminated")) for e in entries)
    return tuple((name, int(end["exitCode"])) for name, end in ended if end and end.get("exitCode"))


def _disruption(obj: Object) -> str | None:
    """The reason that Kubernetes took the pod; None for a pod that it has not taken."""
    condition = objects.condition(obj, "DisruptionTarget") or {}
    if condition.get("status") == "True":
        return str(condition.get("reason") or "DisruptionTarget")
    reason = objects.status(obj).get("reason")
    if reason in _OF_THE_NODE:
        return str(reason)
    return NODE_NOT_READY if _node_is_silent(obj) else None


def _node_is_silent(obj: Object) -> bool:
    """Whether the node lifecycle controller has called the pod not ready, and not the kubelet.

    The kubelet writes Ready and ContainersReady at once, with a reason where a readiness gate makes
    the two differ; the controller writes Ready alone, and leaves its reason empty.
    """
    ready = objects.condition(obj, "Ready") or {}
    containers = objects.condition_is_true(obj, "ContainersReady")
    return ready.get("status") == "False" and not ready.get("reason") and containers


def _held_and_waiting(obj: Object) -> tuple[bool, bool]:
    phase = objects.status(obj).get("phase")
    if phase in ("Failed", "Succeeded"):
        return False, False
    held = phase == "Running" or objects.condition_is_true(obj, "PodScheduled")
    return held, not held


def read_pod(obj: Object) -> Pod:
    """A Ray pod's facts."""
    held, waiting = _held_and_waiting(obj)
    status, meta, labels = objects.status(obj), objects.metadata(obj), objects.labels(obj)
    deleting = objects.being_deleted(obj)
    ended, words = _end(obj)
    alive = not deleting and status.get("phase") in ("Pending", "Running", None) and ended is None
    disruption = objects.condition(obj, "DisruptionTarget") or {}
    evicted = deleting and disruption.get("reason") == "DeletionByTaintManager"
    deleted_at_once = meta.get("deletionGracePeriodSeconds") == 0
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        cluster=labels.get(names.LABEL_CLUSTER, ""),
        group=labels.get(names.LABEL_GROUP),
        role=labels.get(names.LABEL_ROLE, ROLE_HEAD),
        attempt=attempt_label(obj),
        created=objects.created(obj),
        alive=alive,
        ready=alive and objects.condition_is_true(obj, "Ready"),
        stranded=evicted and _node_is_silent(obj) and not deleted_at_once,
        # The API server writes the end of the grace period.
        deletion_deadline=objects.optional_time(meta.get("deletionTimestamp")),
        problem=_container_problem(obj) if alive else None,
        ended=ended,
        last_words=words,
        exits=_exits(status) if ended else (),
        disruption=_disruption(obj),
        held=held,
        waiting=waiting,
        gpus=int(gpus_of_containers(obj.get("spec"))),
        node=(obj.get("spec") or {}).get("nodeName"),
    )


def deployment_is_ready(obj: Object | None) -> bool:
    """Whether the one replica of a Deployment is ready and of the present template."""
    if obj is None:
        return False
    status = objects.status(obj)
    return (
        status.get("observedGeneration") == objects.metadata(obj).get("generation")
        and status.get("readyReplicas", 0) >= 1
        and status.get("updatedReplicas", 0) >= 1
    )


def read(
    *,
    live: dict[tuple[Kind, str], Object],
    ray_clusters: Iterable[Object],
    jobs: Iterable[Object],
    ray_pods: Iterable[Object],
    monitor: Object | None,
    monitor_pods: Iterable[Object],
    server_pods: Sequence[Object] = (),
    makes_groups: bool = False,
) -> Observed:
    """The facts of all objects of one run."""
    problems = (read_pod(obj).problem for obj in monitor_pods)
    of_ray = list(ray_pods)
    return Observed(
        ray_clusters=tuple(read_ray_cluster(obj) for obj in ray_clusters),
        jobs=tuple(read_job(obj, of_ray) for obj in jobs),
        pods=tuple(read_pod(obj) for obj in of_ray),
        monitor_ready=deployment_is_ready(monitor),
        monitor_problem=next((text for text in problems if text), None),
        server_problems=_server_problems(server_pods),
        server_pods=tuple(server_pods),
        makes_groups=makes_groups,
        live=live,
    )


def _server_problems(pods: Iterable[Object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for obj in pods:
        problem = read_pod(obj).problem
        if problem:
            server = objects.labels(obj).get(names.LABEL_SERVER, "")
            found.setdefault(server, f"Pod {objects.name(obj)}: {problem}")
    return found
