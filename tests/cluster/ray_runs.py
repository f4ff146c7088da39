"""TrainingRuns on real Ray pods, for tests that need their jobs to run."""

from typing import Any

from demo.platform import Platform
from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.manifests import changed, minimal
from tests.ray_params import LITTLE_HEAD, LITTLE_RAY

# Ray starts slowly on two busy cores.
START_SECONDS = 240
REPORTING = """
import time
from trainsync.runtime.context import RunContext
context = RunContext.from_env()
for step in range(1000):
    context.report(step, 1000, {})
    time.sleep(1)
"""
POD = {
    "spec": {
        "containers": [
            {"name": "ray", "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
        ]
    }
}


def start(
    ns: Kubectl,
    platform: Platform,
    name: str,
    entrypoint: str,
    head_params: dict[str, str] | None = None,
    *,
    explorers: int = 0,
    ttl: int = 0,
    **policy: Any,
) -> None:
    """Apply a run with one trainer; ``policy`` is its failurePolicy.

    Args:
        ttl: how long its pods stay after its end.
    """
    run = changed(minimal(name), "spec.clusters.0.entrypoint", entrypoint)
    head = {"template": POD, "rayStartParams": {**LITTLE_HEAD, **(head_params or {})}}
    run = changed(run, "spec.clusters.0.head", head)
    run = changed(run, "spec.clusters.0.groups.0.template", POD)
    params = {"num-cpus": "1", **LITTLE_RAY}
    run = changed(run, "spec.clusters.0.groups.0.rayStartParams", params)
    if explorers:
        (trainer,) = run["spec"]["clusters"][0]["groups"]
        group = {**trainer, "name": "explorer", "role": "Explorer", "replicas": explorers}
        run = changed(run, "spec.clusters.0.groups.1", group)
    storage = {"volumeClaimTemplate": {"size": "1Mi", "retentionPolicy": "Delete"}}
    run = changed(run, "spec.checkpoint.storage", storage)
    run = changed(run, "spec.failurePolicy", policy)
    run = changed(run, "spec.ttlSecondsAfterFinished", ttl)
    done = ns.apply(platform.fit(run))
    assert done.returncode == 0, done.stderr


def status(ns: Kubectl, name: str) -> dict[str, Any]:
    """The run's status; fails if the run is gone."""
    run = ns.get("trainingrun", name)
    assert run is not None
    found: dict[str, Any] = run.get("status") or {}
    return found


def wait_phase(ns: Kubectl, name: str, phase: str, seconds: float = START_SECONDS) -> None:
    """Wait until the run has a phase."""

    def reached() -> bool:
        now = status(ns, name)
        found = now.get("phase")
        assert found == phase, (found, now.get("conditions"))
        return True

    wait_until(f"{name} is {phase}", reached, seconds)


def condition(ns: Kubectl, name: str, kind: str) -> dict[str, Any]:
    """A condition of the run."""
    conditions = {each["type"]: each for each in status(ns, name)["conditions"]}
    found: dict[str, Any] = conditions[kind]
    return found


def delete(ns: Kubectl, name: str) -> None:
    """Delete the run, and wait until nothing is left of it."""
    ns("delete", "trainingrun", name, "--wait=false")
    wait_until(f"nothing is left of {name}", lambda: not left_over(ns, name), 120)
