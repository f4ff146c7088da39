"""A proxy before the API server, for tests that break the ways to it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.conftest import Kubectl
from tests.cluster.operator.fault_proxy import FaultProxy
from tests.cluster.operator.operator_process import cluster_of
from tests.ports import port_of, reserved_port


@contextmanager
def running_proxy(kubectl: Kubectl) -> Iterator[FaultProxy]:
    """A proxy before kubectl's API server."""
    cluster = cluster_of(kubectl)["clusters"][0]["cluster"]
    with reserved_port() as port, FaultProxy(cluster, port_of(port)).running() as running:
        yield running


@pytest.fixture
def proxy(kubectl: Kubectl) -> Iterator[FaultProxy]:
    """A proxy of the test."""
    with running_proxy(kubectl) as running:
        yield running


@pytest.fixture(scope="module")
def module_proxy(kubectl: Kubectl) -> Iterator[FaultProxy]:
    """A proxy of the module."""
    with running_proxy(kubectl) as running:
        yield running
