"""The Synchronizer on a Ray of two hosts, one of which a test cuts off or ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from trainsync import ExplorerClient, Synchronizer, Uploader
from trainsync.weights.synchronizer import failover as keeping
from trainsync.weights.synchronizer.actor import actor_options
from trainsync.weights.synchronizer.failover import SynchronizerFailover
from trainsync.weights.synchronizer.report import SynchronizerStatus

from tests.distributed.small_ray.starting import small_ray
from tests.distributed.weights.broadcast.broadcast_network import NEEDS_ROOT, Network, Space
from tests.distributed.weights.synchronizer.actor_deaths import sigkill
from tests.waiting import eventually

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT),
]

LEASE = 3.0
# Ray declares a host lost after half a minute of silence, or after 3 s without a listener.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 3,
}


class FarHost:
    """A node of Ray behind a cable."""

    def __init__(self, space: Space, head: str) -> None:
        self.space = space
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
        command += [f"--address={head}", f"--node-ip-address={space.address}", "--num-cpus=2"]
        command += ['--resources={"far": 100}', "--object-store-memory=100000000"]
        self._starter = subprocess.Popen(
            command, preexec_fn=space.enter, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually(lambda: any("far" in node["Resources"] for node in ray.nodes()), 120)
        self.node = next(node["NodeID"] for node in ray.nodes() if "far" in node["Resources"])


@pytest.fixture(scope="module")
def far() -> Iterator[FarHost]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    network = Network()
    # `ray start` writes the head's address there: elsewhere, other tests would connect to it.
    folder = tempfile.mkdtemp(prefix="ts-")
    space = network.space()
    try:
        with small_ray():
            head = ray.init(
                address="local",
                num_cpus=2,
                object_store_memory=100 << 20,
                include_dashboard=False,
                log_to_driver=False,
                _node_ip_address=network.address,
                _system_config=HEALTH,
                _temp_dir=folder,
            )
        yield FarHost(space, head.address_info["gcs_address"])
    finally:
        end(space)
        ray.shutdown()
        network.end()
        shutil.rmtree(folder, ignore_errors=True)
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def end(space: Space) -> None:
    """Kill -9 of all its processes, the raylet's among them."""
    for pid in space.pids():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def failover(far: FarHost) -> Iterator[SynchronizerFailover]:
    made = SynchronizerFailover(f"hosts-{uuid.uuid4()}", lease_seconds=LEASE)
    yield made
    assert made.close(20)
    ray.kill(made.handle)


class Explorer:
    """On the far host."""

    def __init__(self, synchronizer: Any) -> None:
        self._client = ExplorerClient(synchronizer, "far", timeout=60)

    def take(self, newer_than: int) -> float:
        weights = self._client.wait_and_fetch(newer_than)
        assert weights is not None
        value: float = weights.state_dict["w"][0].item()
        self._client.acknowledge(weights)
        return value


def node_of(actor: Any) -> str:
    node: str = ray.get(
        actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=60
    )
    return node


def status(synchronizer: Any) -> SynchronizerStatus:
    answer: SynchronizerStatus = ray.get(synchronizer.get_status.remote(), timeout=30)
    return answer


def upload(uploader: Uploader, failover: SynchronizerFailover, version: int) -> float:
    """Seconds that it took."""
    started = time.monotonic()
    state = {"w": torch.full((1000,), float(version))}
    assert uploader.upload(state, failover.handle, version, timeout=30).published
    return time.monotonic() - started


def test_it_runs_on_the_node_of_the_process_that_makes_it_and_so_does_a_rebuilt_one(
    far: FarHost, failover: SynchronizerFailover
) -> None:
    here = ray.get_runtime_context().get_node_id()
    others = [Synchronizer.create(f"hosts-{uuid.uuid4()}") for _ in range(6)]
    assert {node_of(actor) for actor in (*others, failover.handle)} == {here}
    for _ in range(2):
        before = failover.rebuilds
        sigkill(failover.handle)
        eventually(lambda before=before: failover.rebuilds > before, 60)
        assert node_of(failover.handle) == here


def test_explorers_whose_host_is_cut_off_hold_up_no_upload_and_come_back(
    far: FarHost, failover: SynchronizerFailover
) -> None:
    near, uploader = ExplorerClient(failover.handle, "near", timeout=60), Uploader(0, 1)
    actor: Any = ray.remote(Explorer).options(num_cpus=0, resources={"far": 1})
    explorer = actor.remote(failover.handle)
    upload(uploader, failover, 1)
    assert ray.get(explorer.take.remote(0), timeout=60) == 1.0
    far.space.unplug()
    try:
        for version in (2, 3):
            assert upload(uploader, failover, version) < 10
            near.acknowledge(near.fetch())
            waited = failover.handle.wait_acknowledged.remote(version, 30.0)
            assert ray.get(waited, timeout=60) is True
        assert status(failover.handle).explorers["far"].status == "lost"
    finally:
        far.space.mend()
    assert ray.get(explorer.take.remote(1), timeout=60) == 3.0
    assert status(failover.handle).explorers["far"].status == "running"


def test_one_whose_host_is_lost_is_rebuilt_on_the_host_of_the_process_that_keeps_it(
    far: FarHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(namespace: str) -> dict[str, Any]:
        there = NodeAffinitySchedulingStrategy(far.node, soft=False)
        return actor_options(namespace) | {"scheduling_strategy": there}

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(keeping, "actor_options", options)
        failover = SynchronizerFailover(f"hosts-{uuid.uuid4()}", lease_seconds=LEASE)
    try:
        near, uploader = ExplorerClient(failover.handle, "near", timeout=60), Uploader(0, 1)
        upload(uploader, failover, 1)
        assert node_of(failover.handle) == far.node
        end(far.space)
        eventually(lambda: failover.rebuilds == 1, 60)
        assert node_of(failover.handle) == ray.get_runtime_context().get_node_id()
        weights = near.wait_and_fetch(0)
        assert weights is not None
        assert weights.version == 1
        near.acknowledge(weights)
        upload(uploader, failover, 2)
        weights = near.wait_and_fetch(1)
        assert weights is not None
        assert weights.state_dict["w"][0] == 2
    finally:
        assert failover.close(20)
        ray.kill(failover.handle)
