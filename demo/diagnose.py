"""Diagnostics for a failed run."""

from __future__ import annotations

from trainsync.api import names

from demo.errors import DemoError
from demo.kubectl import Kubectl

_LINES = "25"


def report(kubectl: Kubectl, run: str, namespace: str, release: str) -> str:
    """Conditions, pods, last events, and the ends of the logs of operator, monitor, job and servers.

    ``release`` is the name of the operator's Helm release and of its namespace.
    """
    head = f"{names.LABEL_RUN}={run},{names.LABEL_ROLE}=Head"
    servers = f"{names.LABEL_RUN}={run},{names.LABEL_COMPONENT}=server"
    job_log = "tail -n 25 /tmp/ray/session_latest/logs/job-driver-*.log"
    questions = (
        ("-n", namespace, "describe", "trainingrun", run),
        ("-n", namespace, "get", "rayjobs,rayclusters,pods,pvc", "-o", "wide"),
        ("-n", namespace, "get", "events", "--sort-by=.lastTimestamp"),
        ("-n", namespace, "logs", f"deployment/{names.monitor_name(run)}", "--tail", _LINES),
        ("-n", release, "logs", f"deployment/{release}", "--tail", _LINES),
    )
    parts = [_answer(kubectl, *words) for words in questions]
    try:
        for pod in kubectl.objects("pods", namespace, head):
            name = str(pod["metadata"]["name"])
            parts.append(_answer(kubectl, "-n", namespace, "exec", name, "--", "sh", "-c", job_log))
        for pod in kubectl.objects("pods", namespace, servers):
            name = str(pod["metadata"]["name"])
            words = ("-n", namespace, "logs", name, "--all-containers", "--prefix")
            parts.append(_answer(kubectl, *words, "--tail", _LINES))
    except DemoError as error:
        parts.append(str(error))
    return "\n".join(parts)


def _answer(kubectl: Kubectl, *words: str) -> str:
    """One command and the end of its output, also when the command fails."""
    try:
        text = kubectl.run(*words, timeout=20)
    except DemoError as error:
        text = str(error)
    lines = text.rstrip().splitlines()[-60:]
    return f"--- kubectl {' '.join(words)}\n" + "\n".join(lines)
