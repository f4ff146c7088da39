"""The policy controller of a devcluster: without it, new pods have no policy."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.kubectl import wait_for
from demo.platform import Platform, devcluster_name, own_cluster
from devcluster.health import examine
from devcluster.lifecycle import require_record
from devcluster.registry import Record
from tests.policies.conftest import devcluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def record(platform: Platform) -> Iterator[Record]:
    """The devcluster, with its controllers up again after the test."""
    if own_cluster(os.environ.get("KUBECONFIG")):
        pytest.skip("KUBECONFIG is a cluster of yours, whose policy controller is not killed")
    yield require_record(devcluster_name(os.environ.get("KUBECONFIG")))
    devcluster("up")


def test_a_dead_controller_is_told_and_up_starts_it_again(record: Record) -> None:
    (dead,) = controllers(record)[:1]
    os.kill(dead, signal.SIGKILL)
    wait_for(
        lambda: any("without kube-router" in fault for fault in examine(record).faults),
        what="the status to tell it",
        seconds=20,
    )
    devcluster("up")
    assert examine(record).faults == []
    assert len(controllers(record)) == record.nodes
    assert dead not in controllers(record)


def controllers(record: Record) -> list[int]:
    """Pids of the cluster's policy controllers."""
    kubeconfig = f"--kubeconfig={record.cluster.policy_kubeconfig}"
    return [int(entry.name) for entry in Path("/proc").iterdir() if kubeconfig in words_of(entry)]


def words_of(process: Path) -> list[str]:
    """A process's command line; empty for what is none, or has ended."""
    try:
        return process.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return []
