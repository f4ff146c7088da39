"""The e2e tests' operator, on a cluster with LWS, whose node has vLLM's environment."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from demo.platform import REPOSITORY, Platform, devcluster_name, own_cluster
from tests.e2e.conftest import installed, server

__all__ = ["platform", "server"]


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    """See that of `tests.e2e`."""
    kubeconfig = os.environ.get("KUBECONFIG")
    if not own_cluster(kubeconfig):
        name = devcluster_name(kubeconfig)
        command = [sys.executable, "-m", "devcluster", "--name", name, "lws"]
        subprocess.run(command, cwd=REPOSITORY, timeout=1800, check=True)
    with installed("leaderWorkerSets.enabled=true") as made:
        yield made
