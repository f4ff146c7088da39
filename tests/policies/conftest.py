"""The e2e tests' operator and runs, on a cluster that enforces NetworkPolicies."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from demo.platform import REPOSITORY, Platform, devcluster_name, own_cluster
from tests.e2e.conftest import platform as e2e_platform

__all__ = ["e2e_platform"]

_BUILD_SECONDS = 1800


@pytest.fixture(scope="session")
def platform(e2e_platform: Platform) -> Iterator[Platform]:
    """The e2e tests' platform; a devcluster gets its policy controller."""
    if not own_cluster(os.environ.get("KUBECONFIG")):
        devcluster("policies", seconds=_BUILD_SECONDS)
    yield e2e_platform


def devcluster(*words: str, seconds: float = 200) -> None:
    """Run a command of devcluster on the tests' cluster."""
    name = devcluster_name(os.environ.get("KUBECONFIG"))
    command = [sys.executable, "-m", "devcluster", "--name", name, *words]
    subprocess.run(command, cwd=REPOSITORY, timeout=seconds, check=True)
