"""Finds failures of the present attempt; pure.

Ray fails a job when an actor that it waits for dies, but not always, and never when the whole head
is gone. So the pods with which the attempt began are checked too. A dead explorer is left to the
job, which may go on without the explorer, fail, or miss its progress deadline.
"""

import re
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from trainsync.api.failure_policy import FailureClass, RestartScope
from trainsync.api.spec import SAVE_DEADLINE_SECONDS
from trainsync.api.status import RollbackState

from trainsync_operator.builders import fingerprint, raycluster
from trainsync_operator.builders.pod_template import ROLE_HEAD
from trainsync_operator.reconcile.decide import losses, startup
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed
from trainsync_operator.reconcile.run import Run, State

# A pod that outlives its grace period for so long is held by something.
STUCK_AFTER: Final = timedelta(seconds=15)
# A head that is not ready may be slow; after this time its job is lost.
HEAD_UNREADY_AFTER: Final = timedelta(seconds=60)
_MESSAGE_LENGTH: Final = 1000
# Ray: "Job entrypoint command failed with exit code 1, last available logs ...".
_JOB_EXIT: Final = re.compile(r"entrypoint command failed with exit code (-?\d{1,5})")


class Reason(StrEnum):
    """Why an attempt ended, in one word."""

    NODE_LOST = "NodeLost"
    POD_STUCK = "PodStuck"
    JOB_INVALID = "JobInvalid"
    JOB_FAILED = "JobFailed"
    TRAINER_POD_LOST = "TrainerPodLost"
    CLUSTER_LOST = "ClusterLost"
    PREEMPTED = "Preempted"
    SPEC_CHANGED = "SpecChanged"
    ROLLBACK = "Rollback"
    HEAD_LOST = "HeadLost"
    HEAD_NOT_READY = "HeadNotReady"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    # Ends the run in any state of the attempt; Job has the same word.
    DEADLINE_EXCEEDED = "DeadlineExceeded"


OF_THE_USER: Final = (Reason.SPEC_CHANGED, Reason.ROLLBACK)
"""Of these the attempt is healthy, and ends only for one that can be made."""
BY_A_LOST_POD: Final = (
    Reason.JOB_FAILED,
    Reason.TRAINER_POD_LOST,
    Reason.HEAD_LOST,
    Reason.HEAD_NOT_READY,
)
"""Of these a pod that the infrastructure took is the cause."""


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended, and the consequences."""

    reason: Reason
    message: str
    scope: RestartScope
    # An attempt that was edited, rolled back or preempted by its queue is no failure.
    counted: bool = True
    failure_class: FailureClass = FailureClass.APPLICATION
    # Containers that failed, with their exit codes; of the job's entrypoint without a container.
    exits: tuple[tuple[str | None, int], ...] = ()
    # Of all causes that were found at the same time.
    all_messages: tuple[str, ...] = ()
    # A restart cannot help.
    hopeless: bool = False


@dataclass
class Findings:
    """Causes found now, and the times at which to check again."""

    causes: list[Cause] = field(default_factory=list)
    due: list[datetime] = field(default_factory=list)


def _after(findings: Findings, moment: datetime, now: datetime, cause: Cause) -> None:
    if now >= moment:
        findings.causes.append(cause)
    else:
        findings.due.append(moment)


def _infrastructure(reason: Reason, message: str) -> Cause:
    infrastructure = FailureClass.INFRASTRUCTURE
    return Cause(reason, message, RestartScope.CLUSTER, failure_class=infrastructure)


def _put_down(state: State, observed: Observed, in_use: datetime, out: Findings) -> None:
    """Put failures of lost pods down to the infrastructure, or to memory."""
    loss = state.trainer_loss
    said = losses.taken_by_infrastructure(state, observed, in_use) or ""
    failure_class = losses.seen_class(state, observed, in_use)
    if loss is not None:
        failure_class = losses.explains_more(failure_class, loss.failure_class)
        said = loss.message
    for index, cause in enumerate(out.causes):
        if cause.reason not in BY_A_LOST_POD:
            continue
        message = cause.message if said in cause.message else f"{said} {cause.message}"
        if failure_class is not FailureClass.APPLICATION:
            cause = replace(cause, failure_class=failure_class)
        out.causes[index] = replace(cause, message=message)


def _exits(
    state: State, observed: Observed, jobs: tuple[Job, ...]
) -> tuple[tuple[str | None, int], ...]:
    """Exit codes of the pods that have ended, and of the jobs, as Ray's message has them."""
    pods = [exit for pod in observed.pods_of(state.cluster_attempt) for exit in pod.exits]
    lost = [] if state.trainer_loss is None else state.trainer_loss.exits
    pods += [(exit.container_name, exit.exit_code) for exit in lost]
    of_jobs = [_JOB_EXIT.search(job.message) for job in jobs]
    return (*pods, *((None, int(found[1])) for found in of_jobs if found))


def edited(run: Run, state: State, observed: Observed) -> tuple[list[str], list[str]]:
    """Fields of which the present pods, and the present jobs, have an older value."""
    of_pods, of_jobs = [], []
    for cluster in run.spec.clusters:
        ray = observed.ray_cluster(cluster.name, state.cluster_attempt)
        if ray is not None:
            wanted = fingerprint.of_pods(run.spec, cluster)
            of_pods += fingerprint.edited(ray.made_from, wanted)
        for job in observed.jobs_of(state.attempt):
            if job.cluster == cluster.name:
                of_jobs += fingerprint.edited(job.made_from, fingerprint.of_job(cluster))
    return of_pods, of_jobs


def _edits(run: Run, state: State, observed: Observed, out: Findings) -> None:
    """Pods and jobs do not change while they run: an edit takes an attempt of its own."""
    of_pods, of_jobs = edited(run, state, observed)
    fields = sorted({*of_pods, *of_jobs})
    if fields:
        scope = RestartScope.CLUSTER if of_pods else RestartScope.JOB
        message = f"Edited: {', '.join(fields)}. The run goes on from its last checkpoint."
        out.causes.insert(0, Cause(Reason.SPEC_CHANGED, message, scope, counted=False))


def _rollback(run: Run, state: State, out: Findings) -> None:
    """The monitor has accepted ``spec.resumeFrom``: any attempt that claims later goes back."""
    answer = (run.status.get("checkpoint") or {}).get("rollback") or {}
    wanted = run.spec.resume_from
    if wanted is None or answer.get("state") != RollbackState.ACCEPTED:
        return
    same = (answer.get("step"), answer.get("request")) == (wanted.step, wanted.request)
    if same and state.attempt <= answer.get("afterAttempt", -1):
        message = f"The run goes back to checkpoint {wanted.step} (spec.resumeFrom)."
        scope = run.spec.failure_policy.restart_scope
        out.causes.append(Cause(Reason.ROLLBACK, message, scope, counted=False))


def _lost_heads(state: State, observed: Observed, out: Findings) -> None:
    """Other pods of a lost node are deleted, and KubeRay makes new ones: see `plan`."""
    for pod in observed.pods_of(state.cluster_attempt):
        if pod.stranded and pod.role == ROLE_HEAD:
            message = f"Head pod {pod.name} of cluster {pod.cluster} is on a node that is lost."
            out.causes.append(_infrastructure(Reason.NODE_LOST, message))


def _stuck_pods(run: Run, state: State, observed: Observed, now: datetime, out: Findings) -> None:
    """KubeRay counts pods that are slow to go as running, and does not replace them.

    A finalizer, a volume that hangs or a node that is lost may hold them. It matters to the start
    of an attempt alone: one that runs has lost the pod already, or goes on without the explorer.
    """
    present = observed.pods_of(state.cluster_attempt)
    wanted: dict[tuple[str, str | None], int] = {
        (c.name, g.name): raycluster.fewest(g) for c in run.spec.clusters for g in c.groups
    }
    for pod in present:
        place = (pod.cluster, pod.group)
        alive = sum(1 for p in present if (p.cluster, p.group) == place and p.alive)
        if pod.deletion_deadline is None or alive >= wanted.get(place, 1):
            continue
        message = (
            f"Pod {pod.name} of cluster {pod.cluster} does not go: a finalizer, a volume that hangs"
            " or a lost node holds it, and KubeRay makes none in its place."
        )
        cause = _infrastructure(Reason.POD_STUCK, message)
        _after(out, pod.deletion_deadline + STUCK_AFTER, now, cause)


def _failed_jobs(jobs: tuple[Job, ...], scope: RestartScope, out: Findings) -> None:
    for job in jobs:
        if job.phase is JobPhase.INVALID and not job.suspended:
            message = f"KubeRay refuses RayJob {job.name}: {job.message}"
            out.causes.append(Cause(Reason.JOB_INVALID, message, scope, hopeless=True))
        elif job.phase in (JobPhase.FAILED, JobPhase.STOPPED):
            message = f"The job of cluster {job.cluster} {job.phase.lower()}: {job.message}"
            out.causes.append(Cause(Reason.JOB_FAILED, message.rstrip(": "), scope))


def _lost_trainers(
    run: Run, state: State, observed: Observed, in_use: datetime, now: datetime, out: Findings
) -> None:
    missing = losses.missing(run, state, observed, in_use)
    if missing is None:
        return
    loss, scope = state.trainer_loss, run.spec.failure_policy.restart_scope
    message = missing.message if loss is None else loss.message
    cause = Cause(Reason.TRAINER_POD_LOST, message, scope)
    if loss is not None and not out.causes:
        _after(out, losses.over(run, loss), now, cause)
        return
    # It explains why no progress is reported.
    reasons = [other.reason for other in out.causes]
    stalled = Reason.PROGRESS_DEADLINE_EXCEEDED
    out.causes.insert(reasons.index(stalled) if stalled in reasons else len(reasons), cause)


def _lost_clusters(
    run: Run, state: State, observed: Observed, started: datetime, now: datetime, out: Findings
) -> None:
    for cluster in run.spec.clusters:
        ray = observed.ray_cluster(cluster.name, state.cluster_attempt)
        if ray is None or ray.deleting:
            message = f"The RayCluster of cluster {cluster.name} was deleted under the job."
            out.causes.append(Cause(Reason.CLUSTER_LOST, message, RestartScope.CLUSTER))
            continue
        if ray.suspended:
            message = f"RayCluster {ray.name} was suspended by its queue."
            # The RayCluster object stays and starts again when Kueue admits it.
            out.causes.insert(0, Cause(Reason.PREEMPTED, message, RestartScope.JOB, counted=False))
            continue
        heads = [
            pod
            for pod in observed.pods_of(state.cluster_attempt)
            if pod.cluster == cluster.name and pod.role == ROLE_HEAD and pod.created <= started
        ]
        if not any(pod.alive for pod in heads):
            message = (
                f"The head pod of cluster {cluster.name} was lost, and all actors with it."
                f"{losses.ends(heads)}"
            )
            out.causes.append(Cause(Reason.HEAD_LOST, message, RestartScope.CLUSTER))
        elif not ray.head_ready and ray.head_ready_since is not None:
            message = (
                f"The head pod of cluster {cluster.name} has not been ready for"
                f" {int(HEAD_UNREADY_AFTER.total_seconds())} s."
            )
            cause = Cause(Reason.HEAD_NOT_READY, message, RestartScope.CLUSTER)
            _after(out, ray.head_ready_since + HEAD_UNREADY_AFTER, now, cause)


def _no_progress(run: Run, started: datetime, now: datetime, out: Findings) -> None:
    policy = run.spec.failure_policy
    if policy.progress_deadline_seconds is None:
        return
    last = max(started, run.last_report or started)
    # Saves that wait for a bucket may hold training up, but none of them waits longer than that.
    if away := startup.store_away_until(run, now):
        timeout = run.spec.checkpoint.save_timeout_seconds or SAVE_DEADLINE_SECONDS
        last = max(last, min(away, last + timedelta(seconds=timeout)))
    message = (
        f"No progress was reported for {policy.progress_deadline_seconds} s"
        " (spec.failurePolicy.progressDeadlineSeconds)."
    )
    cause = Cause(
        Reason.PROGRESS_DEADLINE_EXCEEDED,
        message,
        policy.restart_scope,
        failure_class=FailureClass.STALL,
    )
    _after(out, last + timedelta(seconds=policy.progress_deadline_seconds), now, cause)


def _never_started(
    run: Run, state: State, observed: Observed, now: datetime, out: Findings
) -> None:
    if state.starting_since is None:
        return
    limit = startup.deadline(run)
    failed = startup.pod_failures(run, state, observed)
    message = (
        f"The job did not run within {int(limit.total_seconds())} s"
        f" (spec.failurePolicy.startupDeadlineSeconds). {failed}"
    )
    cause = Cause(
        Reason.STARTUP_DEADLINE_EXCEEDED,
        message.rstrip(),
        RestartScope.CLUSTER,
        failure_class=FailureClass.IMAGE
        if startup.is_of_the_image(state, observed, failed)
        else FailureClass.APPLICATION,
    )
    _after(out, state.starting_since + limit, now, cause)


def find(
    run: Run, state: State, observed: Observed, now: datetime, *, edits: bool = True
) -> Findings:
    """All failures of the present attempt of a run that is neither finished nor suspended.

    Args:
        edits: whether what the user changed may end the attempt, too (`OF_THE_USER`).
    """
    out = Findings()
    if edits:
        _rollback(run, state, out)
        _edits(run, state, observed, out)
    _lost_heads(state, observed, out)
    jobs = observed.jobs_of(state.attempt)
    if not jobs:
        _stuck_pods(run, state, observed, now, out)
        _never_started(run, state, observed, now, out)
        exits = _exits(state, observed, jobs)
        out.causes = [replace(cause, exits=exits) for cause in out.causes]
        return out
    started = max(job.created for job in jobs)
    in_use = losses.in_use_since(run, started, now)
    _lost_clusters(run, state, observed, started, now, out)
    _failed_jobs(jobs, run.spec.failure_policy.restart_scope, out)
    _no_progress(run, started, now, out)
    _lost_trainers(run, state, observed, in_use, now, out)
    _put_down(state, observed, in_use, out)
    _never_started(run, state, observed, now, out)
    exits = _exits(state, observed, jobs)
    out.causes = [replace(cause, exits=exits) for cause in out.causes]
    return out


def combined(causes: list[Cause]) -> Cause:
    """Several causes as one: the first cause's message and the widest restart scope.

    An edit, a rollback or a queue's preemption explains all other causes, and the infrastructure
    those of the application.
    """
    first = causes[0]
    if not first.counted:
        return first
    hopeless = next((cause for cause in causes if cause.hopeless), None)
    if hopeless:
        return hopeless
    wide = any(cause.scope is RestartScope.CLUSTER for cause in causes)
    scope = RestartScope.CLUSTER if wide else RestartScope.JOB
    classes = [cause.failure_class for cause in causes]
    kinds = (one for one in classes if one is not FailureClass.APPLICATION)
    infrastructure = FailureClass.INFRASTRUCTURE in classes
    kind = FailureClass.INFRASTRUCTURE if infrastructure else next(kinds, classes[0])
    return Cause(
        first.reason,
        first.message[:_MESSAGE_LENGTH],
        scope,
        failure_class=kind,
        exits=first.exits,
        all_messages=tuple(cause.message[:_MESSAGE_LENGTH] for cause in causes),
    )
