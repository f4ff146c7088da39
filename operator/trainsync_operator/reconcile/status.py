"""The operator's part of a run's status, from its state and its children; pure.

Conditions follow KEP-1623: all conditions are always present, and a condition's time changes only
with its status. The phase is one word derived from the same facts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from trainsync.api import names
from trainsync.api.spec import Role
from trainsync.api.status import (
    ClusterStatus,
    Condition,
    ConditionStatus,
    ConditionType,
    MonitorStatus,
    Phase,
    RolePods,
    TrainingRunStatus,
    bounded,
)

from trainsync_operator.builders import raycluster
from trainsync_operator.kube import objects
from trainsync_operator.reconcile.decide import failures, hindsight, losses, startup, stopping
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed
from trainsync_operator.reconcile.plan import is_queued, why_monitor_not_ready, why_not_ready
from trainsync_operator.reconcile.run import Problem, Run, State
from trainsync_operator.reconcile.servers import report as servers

OWNED_FIELDS: Final = (
    "observedGeneration", "phase", "attempt", "restarts", "infrastructureRestarts",
    "startTime", "activeSince", "completionTime", "nextAttemptTime", "startingSince",
    "problem", "clusters", "readyClusters", "explorerReplicas", "explorerSelector", "servers",
    "readyServers", "pods", "monitor", "stopping", "lastFailure", "trainerLoss",
)  # fmt: skip
OWNED_CONDITIONS: Final = (
    ConditionType.READY,
    ConditionType.PROGRESSING,
    ConditionType.SUSPENDED,
    ConditionType.COMPLETE,
    ConditionType.FAILED,
    ConditionType.SERVERS_READY,
)
PODS_FAILING: Final = "PodsFailing"
"""Reason of Ready while Ray pods end before there is a job."""
JOB_FAILED: Final = "JobFailed"
"""Reason of Ready while a failed job may turn out to be that of a lost node."""
TRAINER_POD_LOST: Final = "TrainerPodLost"
"""Reason of Ready while a job may get another pod in place of a trainer's."""
_DASHBOARD_PORT: Final = 8265
_SUSPENDED: Final = (
    "spec.suspend is true. Set it to false to go on from the last checkpoint, on new RayClusters."
)
_EDIT_WAITS: Final = " The edit of the spec takes effect when the run resumes."


@dataclass(frozen=True)
class _Fact:
    type: ConditionType
    true: bool
    reason: str
    message: str


def _trainer_job(run: Run, state: State, observed: Observed) -> Job | None:
    name = run.trainer_cluster.name
    return next((job for job in observed.jobs_of(state.attempt) if job.cluster == name), None)


def _why_suspended(job: Job) -> str:
    return (
        f"RayJob {job.name} was suspended when it was made, as Kueue does with jobs that have no"
        " queue, and KubeRay does not start it. Exempt it (Kueue's managedJobsNamespaceSelector, or"
        " its integration ray.io/rayjob), then delete the RayJob: it is made again."
    )


def _ready_and_progressing(
    run: Run,
    state: State,
    observed: Observed,
    waiting: str | None,
    problem: Problem | None,
) -> tuple[_Fact, _Fact]:
    def facts(ready: bool, progressing: bool, reason: str, message: str) -> tuple[_Fact, _Fact]:
        return (
            _Fact(ConditionType.READY, ready, reason, message),
            _Fact(ConditionType.PROGRESSING, progressing, reason, message),
        )

    if state.outcome is not None:
        return facts(False, False, state.outcome.reason, state.outcome.message)
    if problem is not None:
        return facts(False, False, problem.reason, problem.message)
    if state.suspended:
        return facts(False, False, "Suspended", _SUSPENDED)
    if state.stopping is not None:
        edit = _EDIT_WAITS if any(failures.edited(run, state, observed)) else ""
        message = stopping.describe(run, state.stopping) + edit
        return facts(False, True, "Suspending", message)
    if waiting is not None:
        failed = startup.pod_failures(run, state, observed)
        if failed:
            return facts(False, True, PODS_FAILING, f"{failed} {waiting}")
        if is_queued(run, state, observed, waiting):
            return facts(False, True, startup.QUEUED, waiting)
        reason = "BackingOff" if state.next_attempt_time else "Waiting"
        return facts(False, True, reason, waiting)
    suspended = next((job for job in observed.jobs_of(state.attempt) if job.suspended), None)
    if suspended is not None:
        return facts(False, False, "JobSuspended", _why_suspended(suspended))
    job = _trainer_job(run, state, observed)
    if job is not None and job.phase is JobPhase.FAILED:
        message = (
            f"The job of attempt {state.attempt} failed, which ends the run unless Kubernetes tells"
            f" of a lost node within {hindsight.MARKED_WITHIN.total_seconds():g} s. {job.message}"
        )
        return facts(False, False, JOB_FAILED, message)
    if job is None or job.phase is not JobPhase.RUNNING:
        said = f" ({job.status})" if job else ""
        return facts(
            False, True, "JobStarting", f"The job of attempt {state.attempt} starts{said}."
        )
    if state.trainer_loss is not None:
        return facts(False, True, TRAINER_POD_LOST, losses.told(run, state.trainer_loss))
    unready = [why_monitor_not_ready(run, observed)]
    unready += [why_not_ready(cluster, state, observed) for cluster in run.spec.clusters]
    complaint = next((text for text in unready if text), None)
    running = f"The job of attempt {state.attempt} runs."
    if complaint:
        ready = _Fact(ConditionType.READY, False, "NotAllReady", complaint)
        return ready, _Fact(ConditionType.PROGRESSING, True, "Running", running)
    return facts(True, True, "Running", running)


def _facts(
    run: Run,
    state: State,
    observed: Observed,
    waiting: str | None,
    problem: Problem | None,
) -> list[_Fact]:
    ready, progressing = _ready_and_progressing(run, state, observed, waiting, problem)
    suspended = _Fact(
        ConditionType.SUSPENDED,
        state.suspended,
        "Suspended" if state.suspended else "NotSuspended",
        _SUSPENDED if state.suspended else "",
    )
    finished = []
    for kind, wanted in ((ConditionType.COMPLETE, True), (ConditionType.FAILED, False)):
        if state.outcome is not None and state.outcome.succeeded is wanted:
            outcome = state.outcome
            finished.append(_Fact(kind, True, outcome.reason, outcome.message))
        else:
            reason = "NotFinished" if state.outcome is None else "Finished"
            finished.append(_Fact(kind, False, reason, ""))
    return [ready, progressing, suspended, *finished]


def _condition(run: Run, fact: _Fact, now: datetime) -> Condition:
    before = objects.condition({"status": run.status}, fact.type)
    status = ConditionStatus.TRUE if fact.true else ConditionStatus.FALSE
    since = now
    if before is not None and before.get("status") == status:
        since = objects.parse_time(before["lastTransitionTime"])
    return Condition(
        type=fact.type,
        status=status,
        reason=fact.reason,
        message=bounded(fact.message),
        last_transition_time=since,
        observed_generation=run.generation,
    )


def _phase(run: Run, state: State, observed: Observed) -> Phase:
    if state.outcome is not None:
        return Phase.COMPLETE if state.outcome.succeeded else Phase.FAILED
    if state.suspended:
        return Phase.SUSPENDED
    if state.stopping is not None:
        return Phase.SUSPENDING
    job = _trainer_job(run, state, observed)
    runs = job is not None and job.phase in (JobPhase.RUNNING, JobPhase.FAILED)
    if job is not None and runs and run.reported_since(job.created):
        return Phase.RUNNING
    if state.restarts or state.infrastructure_restarts:
        return Phase.RESTARTING
    first = run.spec.clusters[0].name
    return Phase.STARTING if observed.ray_cluster(first, state.cluster_attempt) else Phase.PENDING


def _clusters(run: Run, state: State, observed: Observed) -> list[ClusterStatus]:
    before = {entry.get("name"): entry for entry in run.status.get("clusters") or []}
    result = []
    for cluster in run.spec.clusters:
        ray = observed.ray_cluster(cluster.name, state.cluster_attempt)
        pods = [p for p in observed.pods_of(state.cluster_attempt) if p.cluster == cluster.name]
        job = next((j for j in observed.jobs_of(state.attempt) if j.cluster == cluster.name), None)
        url = None
        if ray is not None and ray.head_service:
            url = f"http://{ray.head_service}.{run.namespace}.svc:{_DASHBOARD_PORT}"
        last = before.get(cluster.name, {}).get("jobStatus") if state.outcome else None
        result.append(
            ClusterStatus(
                name=cluster.name,
                ray_cluster=names.ray_cluster_name(run.name, cluster.name, state.cluster_attempt),
                attempt=state.cluster_attempt,
                ready_workers=sum(1 for pod in pods if pod.group and pod.ready),
                desired_workers=sum(raycluster.fewest(group) for group in cluster.groups),
                dashboard_url=url,
                job_status=job.status if job else last,
                last_pod_failure=startup.pod_failure(run, state, observed, cluster),
            )
        )
    return result


def _pods(run: Run, observed: Observed) -> list[RolePods]:
    roles = {group.role for cluster in run.spec.clusters for group in cluster.groups}
    result = []
    for role in sorted(roles):
        pods = [pod for pod in observed.pods if pod.role == role]
        held, waiting = [p for p in pods if p.held], [p for p in pods if p.waiting]
        result.append(
            RolePods(
                role=role.value,
                held=len(held),
                held_gpus=sum(pod.gpus for pod in held),
                waiting=len(waiting),
                waiting_gpus=sum(pod.gpus for pod in waiting),
            )
        )
    return result


def _problem_word(
    run: Run, state: State, observed: Observed, problem: Problem | None
) -> str | None:
    if state.outcome is not None:
        return None
    if problem is not None:
        return problem.reason
    if state.suspended:
        return None
    if any(job.suspended for job in observed.jobs_of(state.attempt)):
        return "JobSuspended"
    job = _trainer_job(run, state, observed)
    if job is not None and job.phase is JobPhase.FAILED:
        return JOB_FAILED
    of_servers = servers.problem_word(run, observed)
    return startup.problem_word(run, state, observed) or of_servers


def build(
    run: Run,
    state: State,
    observed: Observed,
    now: datetime,
    *,
    waiting: str | None = None,
    problem: Problem | None = None,
    of_servers: Mapping[str, Problem] = MappingProxyType({}),
) -> dict[str, Any]:
    """The operator's fields and conditions of the status, in wire format.

    Args:
        problem: what keeps children of the run from being made.
        of_servers: the same of entries of spec.servers, by name.
    """
    pending = state.next_attempt_time
    found = servers.entries(run, observed, of_servers)
    facts = _facts(run, state, observed, waiting, problem)
    verdict = servers.verdict(run, state, observed, found, of_servers)
    if verdict is not None:
        kind = ConditionType.SERVERS_READY
        facts.append(_Fact(kind, verdict.ready, verdict.reason, verdict.message))
    ready = [why_not_ready(cluster, state, observed) is None for cluster in run.spec.clusters]
    status = TrainingRunStatus(
        observed_generation=run.generation,
        phase=_phase(run, state, observed),
        attempt=state.attempt,
        restarts=state.restarts,
        infrastructure_restarts=state.infrastructure_restarts,
        start_time=state.start_time,
        active_since=state.active_since,
        completion_time=state.completion_time,
        next_attempt_time=pending if pending and now < pending else None,
        starting_since=state.starting_since,
        stopping=state.stopping,
        last_failure=state.last_failure,
        trainer_loss=state.trainer_loss,
        problem=_problem_word(run, state, observed, problem),
        conditions=[_condition(run, fact, now) for fact in facts],
        clusters=_clusters(run, state, observed),
        ready_clusters=f"{sum(ready)}/{len(ready)}",
        explorer_replicas=sum(
            1
            for pod in observed.pods_of(state.cluster_attempt)
            if pod.role == Role.EXPLORER and pod.alive
        ),
        explorer_selector=f"{names.LABEL_RUN}={run.name},{names.LABEL_ROLE}={Role.EXPLORER}",
        servers=found,
        pods=_pods(run, observed),
        ready_servers=servers.ready_count(found),
        monitor=MonitorStatus(ready=observed.monitor_ready),
    )
    return status.to_json_dict()


def owned(status: dict[str, Any]) -> dict[str, Any]:
    """The operator's part of a status that two writers share."""
    mine: dict[str, Any] = {key: status[key] for key in OWNED_FIELDS if key in status}
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    mine["conditions"] = [conditions[kind] for kind in OWNED_CONDITIONS if kind in conditions]
    return mine


def refused(
    raw_status: dict[str, Any],
    generation: int,
    problem: Problem,
    now: datetime,
    truth: ConditionStatus = ConditionStatus.FALSE,
) -> Any:
    """The status of a run whose spec or children cannot be read: as before, but for Ready."""
    mine = owned(raw_status)
    mine.setdefault("phase", str(Phase.PENDING))
    mine["problem"] = problem.reason
    kept = [
        c
        for c in mine["conditions"]
        if c["type"] not in (ConditionType.READY, ConditionType.PROGRESSING)
    ]
    fresh = []
    for kind in (ConditionType.READY, ConditionType.PROGRESSING):
        before = objects.condition({"status": raw_status}, kind) or {}
        since = objects.optional_time(before.get("lastTransitionTime"))
        flipped = before.get("status") != truth
        condition = Condition(
            type=kind,
            status=truth,
            reason=problem.reason,
            message=bounded(problem.message),
            last_transition_time=now if flipped or since is None else since,
            observed_generation=generation,
        )
        fresh.append(condition.to_json_dict())
    return {**mine, "conditions": fresh + kept}
