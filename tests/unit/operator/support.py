"""Objects in the format of the API server and KubeRay, and what the operator observes of them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from trainsync.api.base import format_time
from trainsync_operator.kube.kinds import (
    RUN,
)
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed, Pod, RayCluster
from trainsync_operator.reconcile.run import Run, parse

START = datetime(2026, 1, 1, tzinfo=UTC)


UID = "uid-of-run"


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def spec(**changes: Any) -> dict[str, Any]:
    """A small valid spec: two trainers and two explorers in one cluster."""
    return {
        "clusters": [
            {
                "name": "main",
                "rayVersion": "2.60.0",
                "image": "ray:1",
                "entrypoint": "python -m train",
                "groups": [
                    {"name": "trainer", "role": "Trainer", "replicas": 2},
                    {"name": "explorer", "role": "Explorer", "replicas": 2},
                ],
            }
        ],
        "checkpoint": {"storage": {"persistentVolumeClaim": {"claimName": "data"}}},
        **changes,
    }


def with_servers(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`spec` with servers, of which each entry says what is not usual."""
    template = {"spec": {"containers": [{"name": "vllm", "image": "vllm:1"}]}}
    servers = [{"engine": "VLLM", "template": template, **entry} for entry in entries]
    return spec(**{"servers": servers, "sync": {"method": "checkpoint"}, **changes})


def raw_run(
    run_spec: dict[str, Any] | None = None,
    *,
    name: str = "tiny",
    uid: str = UID,
    status: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
) -> Object:
    return {
        "apiVersion": RUN.api_version,
        "kind": RUN.name,
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": uid,
            "generation": 1,
            "resourceVersion": "1",
            "labels": labels or {},
            "creationTimestamp": format_time(START),
        },
        "spec": run_spec or spec(),
        "status": status or {},
    }


def make_run(run_spec: dict[str, Any] | None = None, **arguments: Any) -> Run:
    return parse(raw_run(run_spec, **arguments))


def job(phase: JobPhase, *, attempt: int = 0, created: datetime = START, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": f"tiny-main-{attempt}",
        "uid": f"uid-job-{attempt}",
        "cluster": "main",
        "attempt": attempt,
        "created": created,
        "deleting": False,
        "phase": phase,
        "status": phase.upper(),
        "message": "",
    }
    return Job(**{**values, **changes})


def ray_cluster(attempt: int = 0, **changes: Any) -> RayCluster:
    values: dict[str, Any] = {
        "name": f"tiny-main-{attempt}",
        "uid": f"uid-ray-{attempt}",
        "cluster": "main",
        "attempt": attempt,
        "deleting": False,
        "suspended": False,
        "head_ready": True,
        "head_ready_since": START - seconds(60),
        "lagging": False,
        "failure": None,
        "head_service": "tiny-main-head-svc",
    }
    return RayCluster(**{**values, **changes})


def pod(role: str, number: int, *, attempt: int = 0, **changes: Any) -> Pod:
    values: dict[str, Any] = {
        "name": f"{role.lower()}-{number}",
        "uid": f"uid-{role.lower()}-{number}",
        "cluster": "main",
        "group": None if role == "Head" else role.lower(),
        "role": role,
        "attempt": attempt,
        "created": START - seconds(30),
        "alive": True,
        "ready": True,
        "stranded": False,
        "deletion_deadline": None,
        "problem": None,
        "ended": None,
    }
    return Pod(**{**values, **changes})


def pods(attempt: int = 0, **changes: Any) -> tuple[Pod, ...]:
    """All pods of the cluster of `spec`."""
    return (
        pod("Head", 0, attempt=attempt, **changes),
        *(pod("Trainer", n, attempt=attempt, **changes) for n in range(2)),
        *(pod("Explorer", n, attempt=attempt, **changes) for n in range(2)),
    )


def healthy(jobs: tuple[Job, ...] = (), attempt: int = 0, **changes: Any) -> Observed:
    values: dict[str, Any] = {
        "ray_clusters": (ray_cluster(attempt),),
        "jobs": jobs,
        "pods": pods(attempt),
        "monitor_ready": True,
    }
    return Observed(**{**values, **changes})
