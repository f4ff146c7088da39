"""Pods that no node takes: a test writes their status, as a kubelet would.

A pod so costs a few requests, and no Ray that starts.
"""

from typing import Any

from trainsync.api import names

from tests.cluster.conftest import Kubectl, wait_until
from tests.cluster.manifests import changed, minimal

NO_IMAGE = "localhost/trainsync/none:1"
# KubeRay deletes a pod that has ended, and without a node it would be gone before it was seen.
_HOLD = "example.com/seen-by-the-test"
_TRUE = ("PodScheduled", "Initialized", "ContainersReady", "Ready")


def run_of(name: str, **spec: Any) -> dict[str, Any]:
    """A run of one trainer whose claim does not exist, so that no node takes its pods."""
    run = changed(minimal(name), "spec.clusters.0.image", NO_IMAGE)
    run = changed(run, "spec.monitor", {"resources": {"requests": {"cpu": "10m"}}})
    run["spec"] |= {"ttlSecondsAfterFinished": 0, **spec}
    return run


def pods_of(ns: Kubectl, run: str, role: str = "") -> list[dict[str, Any]]:
    """The run's pods, its monitor's too; or those of a role."""
    of_role = f",{names.LABEL_ROLE}={role}" if role else ""
    return ns.list("pod", f"{names.LABEL_RUN}={run}{of_role}")


def wait_for_pod(ns: Kubectl, run: str, role: str) -> dict[str, Any]:
    """The one pod of a role that is not being deleted."""

    def there() -> dict[str, Any]:
        found = [p for p in pods_of(ns, run, role) if "deletionTimestamp" not in p["metadata"]]
        (pod,) = found or [{}]
        return pod

    pod: dict[str, Any] = wait_until(f"{run} has a pod of role {role}", there)
    return pod


def wait_for_job(ns: Kubectl, run: str, attempt: int) -> None:
    """Let all pods of the run be ready until the attempt's job is made."""

    def made() -> bool:
        for pod in pods_of(ns, run):
            if "deletionTimestamp" not in pod["metadata"] and not _is_ready(pod):
                act(ns, pod, {"running": {}})
        return ns.get("rayjob", names.ray_job_name(run, "main", attempt)) is not None

    wait_until(f"{run} has the job of attempt {attempt}", made)


def act(
    ns: Kubectl,
    pod: dict[str, Any],
    state: dict[str, Any],
    before: dict[str, Any] | None = None,
) -> None:
    """Write the state of a pod's container.

    Args:
        state: ``running``, ``waiting`` or ``terminated``, as in a container's status.
        before: the same of the container before it was started again.
    """
    (container,) = pod["spec"]["containers"]
    runs = "running" in state
    status: dict[str, Any] = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": runs,
        "restartCount": 0,
        "state": state,
        "lastState": before or {},
    }
    if "terminated" in state:
        ns.patch("pod", pod["metadata"]["name"], {"metadata": {"finalizers": [_HOLD]}})
    change = {
        "phase": "Running" if runs else "Failed" if "terminated" in state else "Pending",
        "conditions": [{"type": kind, "status": "True" if runs else "False"} for kind in _TRUE],
        "containerStatuses": [status],
    }
    ns.patch("pod", pod["metadata"]["name"], {"status": change}, "status")


def release(ns: Kubectl, pod: dict[str, Any]) -> None:
    """Let a pod that has ended go."""
    ns.patch("pod", pod["metadata"]["name"], {"metadata": {"finalizers": None}})


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)
