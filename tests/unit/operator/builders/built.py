"""Children that are built for a run, for tests."""

from typing import Any

from trainsync_operator.builders import (
    monitor_deployment,
    raycluster,
    rayjob,
)
from trainsync_operator.builders.target import MonitorSettings, Target

from tests.unit.operator.support import make_run, spec


def target(run_spec: dict[str, Any] | None = None, **arguments: Any) -> Target:
    return Target(make_run(run_spec, **arguments), 7, 5, MonitorSettings("monitor:1"))


def built_cluster(run_spec: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    chosen = target(run_spec, **arguments)
    return raycluster.build(chosen, chosen.run.spec.clusters[0])


def built_job(run_spec: dict[str, Any] | None = None) -> dict[str, Any]:
    chosen = target(run_spec)
    return rayjob.build(chosen, chosen.run.spec.clusters[0], "uid-ray")


def with_cluster(**changes: Any) -> dict[str, Any]:
    changed = spec()
    changed["clusters"][0].update(changes)
    return changed


def trainer_pod(cluster: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    return pod


def monitor_pod(chosen: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = monitor_deployment.build(target(chosen))["spec"]["template"]["spec"]
    return pod


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in pod["containers"][0]["env"] if "value" in e}


def in_bucket(**more: Any) -> dict[str, Any]:
    """A spec whose checkpoints are in a bucket."""
    store = {"url": "s3://bucket/run", **more}
    return spec(checkpoint={"storage": {"objectStore": store}})
