"""One cluster, one operator installed by the chart, one namespace for all e2e tests."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from trainsync.api import names

from demo.bucket import BUCKET
from demo.platform import Images, Platform, devcluster_name, own_cluster, prepare
from devcluster import lifecycle
from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.e2e import harness
from tests.store.servers.server import Server, serving

IMAGE_VARIABLES = ("OPERATOR_IMAGE", "MONITOR_IMAGE", "RAY_IMAGE")


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    """The development cluster, or the cluster of KUBECONFIG with the environment's images."""
    with installed() as made:
        yield made


@contextmanager
def installed(*values: str) -> Iterator[Platform]:
    """See `platform`.

    Args:
        values: of the chart, beside the tests' own: ``name=value``.
    """
    kubeconfig = os.environ.get("KUBECONFIG")
    # Not on the node that tests lose, where a cluster has two from the start.
    images, settings = None, [r"nodeSelector.kubernetes\.io/hostname=node-1"]
    if own_cluster(kubeconfig):
        missing = [name for name in IMAGE_VARIABLES if name not in os.environ]
        if missing:
            pytest.skip(f"KUBECONFIG is a cluster of yours: name its images in {missing}")
        images, settings = Images(*(os.environ[name] for name in IMAGE_VARIABLES)), []
    made = prepare(kubeconfig, images, Progress())
    made.install_chart(harness.RELEASE, [harness.NAMESPACE], *settings, *values)
    made.kubectl.run(
        *("-n", harness.NAMESPACE, "delete", names.PLURAL, "--all", "--cascade=foreground"),
        timeout=180,
    )
    yield made
    made.run_helm("uninstall", harness.RELEASE, "--namespace", harness.RELEASE, "--wait")
    made.kubectl.run("delete", "namespace", harness.NAMESPACE, harness.RELEASE, timeout=180)


@pytest.fixture
def start(platform: Platform) -> Iterator[Callable[..., harness.Run]]:
    """Start runs of the workload, which are deleted at the end of the test."""
    runs: list[harness.Run] = []

    def start_run(name: str, *arguments: str, **spec: Any) -> harness.Run:
        runs.append(harness.start(platform, name, *arguments, **spec))
        return runs[-1]

    yield start_run
    for run in runs:
        run.delete()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """An S3 server on this machine, which the development cluster's pods reach."""
    if own_cluster(os.environ.get("KUBECONFIG")):
        pytest.skip("KUBECONFIG is a cluster of yours, whose pods do not reach this machine")
    host = lifecycle.require_record(devcluster_name(os.environ.get("KUBECONFIG"))).cluster
    program = ensure_store_servers(Progress()).path("versitygw")
    with serving(program, tmp_path / "data", host.host_address) as found:
        found.bucket(BUCKET)
        yield found


@pytest.fixture
def again() -> Iterator[ExitStack]:
    """Ends servers that the test starts."""
    with ExitStack() as stack:
        yield stack
