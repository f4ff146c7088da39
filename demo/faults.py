"""Faults that the demo injects."""

from __future__ import annotations

import contextlib

from trainsync.api import names

from demo.errors import DemoError, KubectlError
from demo.kubectl import Kubectl, Object, wait_for

# Kills every process of the container except the shell and process 1, which the kernel protects.
# Process 1, `ray start --block`, ends when Ray's processes are gone.
KILL_ALL = ("bash", "-c", "kill -9 -1")
_DEAD_SECONDS = 60
_EXEC_SECONDS = 60
# Kills the rank's actor, by its title; the brackets keep the shell's own title out.
KILL_RANK = (
    "for p in /proc/[0-9]*; do grep -qs '[_]RankActor' $p/cmdline && kill -9 ${p#/proc/}; done"
)


def pods_of(kubectl: Kubectl, run: str, namespace: str, role: str) -> list[Object]:
    """Running Ray pods of a run with one role (Head, Trainer, Explorer), by name."""
    selector = f"{names.LABEL_RUN}={run},{names.LABEL_ROLE}={role}"
    pods = kubectl.objects("pods", namespace, selector)
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    return sorted(
        (pod for pod in running if "deletionTimestamp" not in pod["metadata"]),
        key=lambda pod: str(pod["metadata"]["name"]),
    )


def kill_pod_processes(kubectl: Kubectl, pod: str, namespace: str) -> None:
    """SIGKILL all processes of a pod at once; returns when the pod no longer runs.

    Raises DemoError when it still runs after a minute.
    """
    # The connection may break with the container; the loop below checks for success.
    with contextlib.suppress(KubectlError):
        kubectl.exec(pod, namespace, *KILL_ALL, timeout=_EXEC_SECONDS)

    def gone() -> bool:
        found = kubectl.get("pod", pod, namespace)
        return found is None or found["status"].get("phase") != "Running"

    wait_for(gone, what=f"pod {pod} to end after SIGKILL", seconds=_DEAD_SECONDS)


def kill_rank(kubectl: Kubectl, pod: str, namespace: str) -> None:
    """SIGKILL the processes of a trainer's rank; its pod goes on."""
    kubectl.exec(pod, namespace, "bash", "-c", f"{KILL_RANK}; true", timeout=_EXEC_SECONDS)


def trainer_to_kill(kubectl: Kubectl, run: str, namespace: str) -> str:
    """Name of a trainer pod of the run. Raises DemoError when none runs."""
    pods = pods_of(kubectl, run, namespace, "Trainer")
    if not pods:
        raise DemoError(f"run {namespace}/{run} has no running trainer pod to kill")
    return str(pods[-1]["metadata"]["name"])
