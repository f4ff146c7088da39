"""``trainsync run`` on an ended run, compared with its monitor and Ray's dashboard."""

import subprocess
import sys
from pathlib import Path

from demo.kubectl import Kubectl


class CommandLine:
    """Runs commands like a user; each must succeed."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self.namespace = namespace
        self._where = ("-n", namespace, "--kubeconfig", str(kubeconfig))

    def __call__(self, *words: str) -> tuple[str, str]:
        """Run the command; returns stdout and stderr."""
        code = "from trainsync.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "run", *words, *self._where],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr


def check(command: CommandLine, kubectl: Kubectl, run: str) -> None:
    """The demo's run: 60 steps, one trainer killed, complete."""
    assert "60/60" in command("status", run)[0]
    told, missing = command("timeline", run)
    assert missing == ""  # the monitor answered through the API server
    for part in ("Attempt 0 was claimed", "Attempt 1 was claimed", "Attempt 0 ended", "Complete"):
        assert part in " ".join(told.split()), told
    assert run in command("events", run)[0]
    assert len(job_log(kubectl, command.namespace, run).splitlines()) == 3


def job_log(kubectl: Kubectl, namespace: str, run: str) -> str:
    """The last 3 lines of the newest training job's log, as docs/cli.md asks for them."""
    jobs = kubectl.objects("rayjobs", namespace, f"trainsync.dev/run={run}")
    job = max(jobs, key=lambda job: int(job["metadata"]["labels"]["trainsync.dev/attempt"]))
    service = f"{job['spec']['clusterSelector']['ray.io/cluster']}-head-svc:8265"
    query = f"submission_id={job['metadata']['name']}&node_id=any&lines=3"
    path = f"/api/v1/namespaces/{namespace}/services/{service}/proxy/api/v0/logs/file?{query}"
    return kubectl.run("get", "--raw", path)
