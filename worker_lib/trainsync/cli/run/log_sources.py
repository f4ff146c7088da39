"""Where the logs of a run's parts are: pods, and for the driver Ray's dashboard."""

import collections
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Final

from trainsync.api import names
from trainsync.api.spec import Role
from trainsync.cli.output.console import REFUSED, USAGE
from trainsync.cli.run import loglines
from trainsync.cli.run.cluster import Cluster, Object
from trainsync.cli.run.errors import ClusterError, ForbiddenError

_MONITOR: Final = "monitor"
_OPERATOR_SELECTOR: Final = "app.kubernetes.io/name=trainsync-operator"
# The operator writes of all runs: so many of its lines are looked through for those of one.
_LOOKED_THROUGH: Final = 100_000
_DASHBOARD_PORT: Final = 8265
# What Ray gives when it is asked for "the last lines".
_RAY_LOGS: Final = "api/v0/logs"


async def driver(
    cluster: Cluster,
    run: str,
    attempt: int | None,
    part_of_run: str | None = None,
    *,
    follow: bool,
    tail: int,
) -> AsyncIterator[str]:
    """The log of the job of one of the run's clusters, and what its workers print.

    Args:
        part_of_run: the name of that cluster; None: the one that trains.

    Raises:
        ClusterError: no such cluster, no job, its Ray cluster is gone, or the right is lacking.
    """
    found = await cluster.run(run)
    name = part_of_run if part_of_run is not None else _trains(found)
    clusters = _cluster_names(found)
    if name not in clusters:
        raise ClusterError(f"run {run} has no cluster {name}; it has: {', '.join(clusters)}", USAGE)
    jobs = [
        job
        for job in await cluster.ray_jobs(run)
        if _attempt_of(job) is not None and _label(job, names.LABEL_CLUSTER) == name
    ]
    wanted = [job for job in jobs if attempt is None or _attempt_of(job) == attempt]
    if not wanted:
        there = ", ".join(sorted({str(_attempt_of(job)) for job in jobs})) or "none"
        what = f"attempt {attempt}" if attempt is not None else "any attempt"
        phase = (found.get("status") or {}).get("phase", "Pending")
        raise ClusterError(
            f"cluster {name} of run {run} has no RayJob of {what} (of attempts: {there}; phase "
            f"{phase})",
            USAGE,
        )
    job = max(wanted, key=lambda job: _attempt_of(job) or 0)
    job_id = str((job.get("spec") or {}).get("jobId") or job["metadata"]["name"])
    head = str((job.get("spec") or {}).get("clusterSelector", {}).get("ray.io/cluster", ""))
    service = f"{head}-head-svc:{_DASHBOARD_PORT}"
    kind = "stream" if follow else "file"
    path = f"/api/v1/namespaces/{cluster.namespace}/services/{service}/proxy/{_RAY_LOGS}/{kind}"
    # Ray finds the node by the job, yet insists on a node in the request.
    query = {"submission_id": job_id, "node_id": "of-the-job", "lines": str(tail)}
    what = f"services/proxy of {service}"
    try:
        async for line in cluster.lines(path, what, query):
            yield line
    except ForbiddenError:
        raise
    except ClusterError as error:
        raise ClusterError(
            f"the driver's log of {job_id} cannot be had from Ray's dashboard, which lives as long "
            f"as RayCluster {head}: {error}",
            REFUSED,
        ) from error


async def monitor(
    cluster: Cluster, run: str, *, follow: bool, tail: int, since: timedelta | None
) -> AsyncIterator[str]:
    """The log of the run's monitor. Raises `ClusterError`."""
    await cluster.run(run)  # a run that is not there is said so
    selector = f"{names.LABEL_RUN}={run},{names.LABEL_COMPONENT}={_MONITOR}"
    pod = _newest(await cluster.pods(selector), f"run {run} has no monitor pod now")
    path, query = _of_pod(pod, follow=follow, tail=tail, since=since)
    async for line in cluster.lines(path, "pods/log", query):
        yield line


async def operator(
    cluster: Cluster, run: str, *, follow: bool, tail: int, since: timedelta | None
) -> AsyncIterator[str]:
    """The lines of the operators' logs that are about the run; one of several operators leads.

    Raises:
        ClusterError: no operator is seen, or the right to see it is lacking.
    """
    await cluster.run(run)
    pods = await cluster.pods(_OPERATOR_SELECTOR, everywhere=True)
    if not pods:
        raise ClusterError(f"no operator pod ({_OPERATOR_SELECTOR}) is in the cluster")
    last: collections.deque[str] = collections.deque(maxlen=tail)
    leader = None
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        path, query = _of_pod(pod, follow=False, tail=_LOOKED_THROUGH, since=since)
        async for line in cluster.lines(path, "pods/log", query):
            if loglines.about(line, cluster.namespace, run):
                last.append(line)
                leader = pod
    for line in sorted(last, key=_time):
        yield line
    if not follow:
        return
    pod = leader or _newest(pods, "no operator pod is in the cluster")
    path, query = _of_pod(pod, follow=True, tail=0, since=None)
    async for line in cluster.lines(path, "pods/log", query):
        if loglines.about(line, cluster.namespace, run):
            yield line


def _of_pod(
    pod: Object, *, follow: bool, tail: int, since: timedelta | None
) -> tuple[str, dict[str, str]]:
    meta = pod["metadata"]
    query = {"tailLines": str(tail), "container": str(pod["spec"]["containers"][0]["name"])}
    if follow:
        query["follow"] = "true"
    if since is not None:
        query["sinceSeconds"] = str(max(int(since.total_seconds()), 1))
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/log", query


def _newest(pods: list[Object], otherwise: str) -> Object:
    if not pods:
        raise ClusterError(otherwise)
    return max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def _cluster_names(run: Object) -> list[str]:
    return [str(cluster["name"]) for cluster in run["spec"]["clusters"]]


def _trains(run: Object) -> str:
    """The cluster with the Trainer group; the CRD sees to it that a run has exactly one."""
    return next(
        str(cluster["name"])
        for cluster in run["spec"]["clusters"]
        if any(group["role"] == Role.TRAINER for group in cluster["groups"])
    )


def _attempt_of(job: Object) -> int | None:
    label = _label(job, names.LABEL_ATTEMPT)
    return int(label) if label.isdecimal() else None


def _label(job: Object, label: str) -> str:
    return str((job["metadata"].get("labels") or {}).get(label, ""))


def _time(line: str) -> str:
    entry = loglines.parse(line)
    return str(entry.get("time", "")) if entry is not None else ""
