"""Children to create and to delete for a state; pure."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from trainsync.api import names
from trainsync.api.base import format_time
from trainsync.api.spec import Cluster

from trainsync_operator.builders import (
    monitor_deployment,
    monitor_image,
    monitor_rbac,
    pvc,
    raycluster,
    rayjob,
    service,
)
from trainsync_operator.builders.pod_template import ROLE_HEAD
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import (
    CLAIM,
    DEPLOYMENT,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    ROLE_BINDING,
    RUN,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.decide import startup
from trainsync_operator.reconcile.observed import Observed, RayCluster
from trainsync_operator.reconcile.run import Problem, Run, SpecError, State
from trainsync_operator.reconcile.servers import wanted as servers
from trainsync_operator.reconcile.servers.wanted import ServerChildren

MONITOR_AFTER_END: Final = timedelta(hours=1)


@dataclass(frozen=True)
class Doomed:
    """An object to delete, by uid, so that a new object with the same name is safe."""

    kind: Kind
    name: str
    uid: str


@dataclass
class Plan:
    """Changes to the children. Deletions come first: an old driver stops before a new one
    starts."""

    delete: list[Doomed] = field(default_factory=list)
    ensure: list[tuple[Kind, Object]] = field(default_factory=list)
    # Why the job of this attempt is not created yet.
    waiting: str | None = None
    due: list[datetime] = field(default_factory=list)
    servers: ServerChildren = field(default_factory=ServerChildren)
    # Jobs of the attempt, whether they are made now or wait.
    jobs: list[tuple[Kind, Object]] = field(default_factory=list)
    # What keeps children from being made or changed; deletions go on.
    problem: Problem | None = None


def clusters_wanted(run: Run, state: State, now: datetime) -> bool:
    """Whether the run's RayClusters should exist."""
    if state.outcome is None:
        return not state.suspended
    if run.spec.suspend or state.completion_time is None:
        return False
    return now < state.completion_time + timedelta(seconds=run.spec.ttl_seconds_after_finished)


def _in_queue(cluster: Cluster, ray: RayCluster) -> str:
    return f"Cluster {cluster.name}: RayCluster {ray.name} waits in its queue."


def is_queued(run: Run, state: State, observed: Observed, waiting: str) -> bool:
    """Whether a queue is what the run waits for."""
    found = ((c, observed.ray_cluster(c.name, state.cluster_attempt)) for c in run.spec.clusters)
    return any(ray and ray.suspended and waiting == _in_queue(c, ray) for c, ray in found)


def why_not_ready(cluster: Cluster, state: State, observed: Observed) -> str | None:
    """One sentence on why a cluster is not ready; None when all its pods are ready."""
    ray = observed.ray_cluster(cluster.name, state.cluster_attempt)
    if ray is None or ray.deleting:
        return f"Cluster {cluster.name}: its RayCluster is being made."
    if ray.suspended:
        return _in_queue(cluster, ray)
    if ray.failure:
        return f"Cluster {cluster.name}: KubeRay cannot make its pods: {ray.failure}"
    pods = [p for p in observed.pods_of(state.cluster_attempt) if p.cluster == cluster.name]
    problem = next((f" Pod {p.name}: {p.problem}" for p in pods if p.problem), "")
    if not problem and ray.lagging:
        # KubeRay reports a refused spec only by a stale observedGeneration and an Event. The number
        # may also be stale without an error, so it goes into the message and never decides.
        problem = f" KubeRay may not have taken up RayCluster {ray.name}: see its Events."
    for group in cluster.groups:
        ready = sum(1 for pod in pods if pod.group == group.name and pod.ready)
        wanted = raycluster.fewest(group)
        if ready < wanted:
            return (
                f"Cluster {cluster.name}: {ready} of {wanted} pods of group {group.name}"
                f" are ready.{problem}"
            )
    if not ray.head_ready or not any(pod.role == ROLE_HEAD and pod.ready for pod in pods):
        return f"Cluster {cluster.name}: its head pod is not ready.{problem}"
    return None


def why_monitor_not_ready(run: Run, observed: Observed) -> str | None:
    """One sentence on why the monitor is not ready; None when it is ready."""
    if observed.monitor_ready:
        return None
    said = observed.monitor_problem or startup.store_problem(run)
    problem = f" {said}" if said else ""
    return f"The run's monitor is not ready.{problem}"


def _why_no_job(run: Run, state: State, observed: Observed, now: datetime) -> str | None:
    if state.next_attempt_time and now < state.next_attempt_time:
        when = format_time(state.next_attempt_time)
        return f"Attempt {state.attempt} waits for its back-off to end, at {when}."
    old = [j.name for j in observed.jobs if j.attempt != state.attempt and not j.finished]
    if old:
        return f"RayJob {old[0]} of an older attempt is being stopped."
    monitor = why_monitor_not_ready(run, observed)
    if monitor:
        return monitor
    reasons = (why_not_ready(cluster, state, observed) for cluster in run.spec.clusters)
    return next((reason for reason in reasons if reason), None)


def _doomed(run: Run, state: State, observed: Observed, keep_clusters: bool) -> list[Doomed]:
    doomed = []
    for job in observed.jobs:
        over = state.suspended or state.outcome is not None or job.attempt != state.attempt
        # The last failed job stays, for debugging.
        told = job.finished and job.attempt >= state.attempt - 1
        if over and not told and not job.deleting:
            doomed.append(Doomed(RAY_JOB, job.name, job.uid))
    for ray in observed.ray_clusters:
        present = keep_clusters and ray.attempt == state.cluster_attempt
        if not present and not ray.deleting:
            doomed.append(Doomed(RAY_CLUSTER, ray.name, ray.uid))
    if not keep_clusters or state.outcome is not None:
        return doomed  # a run that has ended needs no new pod
    # KubeRay counts a pod that nothing ends as running: no new one would be made, and to make the
    # cluster anew would cost the memory of all other pods, with the lost one's neighbour's copy.
    doomed += [
        Doomed(POD, pod.name, pod.uid)
        for pod in observed.pods_of(state.cluster_attempt)
        if pod.stranded and pod.role != ROLE_HEAD
    ]
    return doomed


def monitor_ends(run: Run, completed: datetime) -> datetime:
    """When the monitor of a run that has finished goes: its page is of use for a while."""
    own = run.spec.monitor.ttl_seconds_after_finished
    if own is not None:
        return completed + timedelta(seconds=own)
    ttl = timedelta(seconds=run.spec.ttl_seconds_after_finished)
    return completed + max(ttl, MONITOR_AFTER_END)


def _monitor(
    run: Run, state: State, observed: Observed, target: Target, now: datetime
) -> list[tuple[Kind, Object]]:
    if state.completion_time is None:
        live = observed.live.get((DEPLOYMENT, names.monitor_name(run.name)))
        running = monitor_deployment.image_of(live) if live else None
        refused = monitor_image.why_refused(run.spec.monitor.image, target.monitor, running)
        if refused:
            raise SpecError(refused)
        return [(DEPLOYMENT, monitor_deployment.build(target))]
    if now >= monitor_ends(run, state.completion_time):
        return [(DEPLOYMENT, monitor_deployment.build(target, replicas=0))]
    return []  # it is left as it is, also by a new release


def plan(
    run: Run,
    state: State,
    observed: Observed,
    now: datetime,
    chosen: MonitorSettings,
    held: Problem | None = None,
) -> Plan:
    """Children to create, correct and delete.

    Args:
        held: why an edit of the spec has no effect yet: no child is changed to it.
    """
    result = Plan()
    gone = run.spec.delete_after_finished_seconds
    if gone is not None and state.completion_time is not None:
        ends = state.completion_time + timedelta(seconds=gone)
        if now >= ends:
            return Plan(delete=[Doomed(RUN, run.name, run.uid)])
        result.due.append(ends)
    wanted = clusters_wanted(run, state, now)
    if wanted and state.completion_time:
        ttl = timedelta(seconds=run.spec.ttl_seconds_after_finished)
        result.due.append(state.completion_time + ttl)
    if state.completion_time and now < monitor_ends(run, state.completion_time):
        result.due.append(monitor_ends(run, state.completion_time))
    result.delete = _doomed(run, state, observed, wanted)
    target = Target(run, state.attempt, state.cluster_attempt, chosen)
    ended = state.outcome is not None
    result.servers = servers.plan(target, observed, serves=wanted, ended=ended)
    try:
        _children(result, target, state, observed, now, trains=wanted and held is None)
    except SpecError as error:
        result.ensure = []
        result.problem = Problem("InvalidSpec", str(error))
    if held is not None:
        result.problem = held
        there = observed.live
        result.ensure = [e for e in result.ensure if (e[0], objects.name(e[1])) not in there]
    return result


def _children(
    result: Plan, target: Target, state: State, observed: Observed, now: datetime, *, trains: bool
) -> None:
    """Add what must exist; ``trains`` says whether that is RayClusters and jobs, too.

    Raises:
        SpecError: a child cannot be built from the spec.
    """
    run = target.run
    there = observed.live.get((CLAIM, target.claim_name or ""))
    claim = pvc.build(target, there)
    # That of a run that has finished may be deleted, and is not made anew.
    kept = there is not None and not objects.being_deleted(there)
    if claim and (state.completion_time is None or kept):
        result.ensure.append((CLAIM, claim))
    # What has ended is left as it is, to be looked at until it is deleted.
    # While it saves, too: an edit would be put into what runs unseen, and begin no attempt.
    trains = trains and state.outcome is None and state.stopping is None
    if trains:  # first: its pods take longest
        for cluster in run.spec.clusters:
            name = names.ray_cluster_name(run.name, cluster.name, state.cluster_attempt)
            live = observed.live.get((RAY_CLUSTER, name))
            result.ensure.append((RAY_CLUSTER, raycluster.build(target, cluster, live)))
    result.ensure += [
        (SERVICE_ACCOUNT, monitor_rbac.service_account(target)),
        (ROLE_BINDING, monitor_rbac.role_binding(target)),
        (SERVICE, service.build(target)),
    ]
    result.ensure += _monitor(run, state, observed, target, now)
    if not trains:
        return

    # Built whether they are made now or not: a spec that cannot be built is told of early.
    for cluster in run.spec.clusters:
        if cluster.entrypoint:
            ray = observed.ray_cluster(cluster.name, state.cluster_attempt)
            built = rayjob.build(target, cluster, ray.uid if ray else "")
            result.jobs.append((RAY_JOB, built))
    if not observed.jobs_of(state.attempt):
        result.waiting = _why_no_job(run, state, observed, now)
        if state.next_attempt_time and now < state.next_attempt_time:
            result.due.append(state.next_attempt_time)
    if result.waiting is None:
        result.ensure += result.jobs
