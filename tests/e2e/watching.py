"""A local Prometheus that scrapes an operator and a run's monitor inside the cluster."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainsync.api import names

from demo.kubectl import Kubectl
from monitoring.generated import rules_text
from monitoring.prometheus import Server, Target, running
from monitoring.rules import Pace
from tests.e2e import harness


@contextmanager
def watching(kubectl: Kubectl, run: str, directory: Path, pace: Pace) -> Iterator[Server]:
    """Scrape the operator of the e2e tests and a run that may not exist yet.

    The scrape goes through the API server (`kubectl proxy`), which works with every cluster.
    """
    services = {
        "operator": (harness.RELEASE, f"{harness.RELEASE}-metrics:metrics"),
        "monitor": (harness.NAMESPACE, f"{names.monitor_name(run)}:http"),
    }
    with _proxy(kubectl) as address:
        targets = [
            Target(job, address, f"/api/v1/namespaces/{namespace}/services/{service}/proxy/metrics")
            for job, (namespace, service) in services.items()
        ]
        with running(directory, targets, rules_text(pace)) as server:
            yield server


@contextmanager
def _proxy(kubectl: Kubectl) -> Iterator[str]:
    argv = [str(kubectl.program), f"--kubeconfig={kubectl.kubeconfig}", "proxy", "--port=0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            # readline returns at kubectl's first line or at its exit, so needs no deadline.
            found = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
            assert found, "kubectl proxy did not say where it listens"
            yield found[0]
        finally:
            process.terminate()
