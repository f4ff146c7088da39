"""A trainer's Ray node is killed, as with its pod, and another comes: the run goes on in place."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from tiny_grpo.probes import PROBE_TOLERANCE
from tiny_grpo.ray_trainers import PodLostError, RankPlaces, await_pods
from trainsync.api import env
from trainsync.api.names import RAY_RESOURCE_EXPLORER, RAY_RESOURCE_TRAINER

from tests.distributed.small_ray.starting import small_ray
from tests.distributed.tiny_run import CONFIG, PYTHONPATH, Run, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

STEPS = 24
QUIET_SECONDS = 3.0  # many steps: the batches in store are used up then
SMALL = replace(CONFIG, steps=STEPS)
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
OF_TRAINER = {RAY_RESOURCE_TRAINER: 1}


class Pods:
    """A Ray with a node for each trainer, and one for all else."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._nodes = [self._made(), self._made()]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def _made(self) -> Any:
        with small_ray():
            return self._cluster.add_node(**NODE, resources=OF_TRAINER)

    def lose(self) -> str:
        """Kill the last trainer's node with all processes there; its id."""
        node = self._nodes.pop()
        self._cluster.remove_node(node, allow_graceful=False)
        return str(node.node_id)

    def replace(self) -> None:
        self._nodes.append(self._made())


@pytest.fixture
def ray_pods(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    # It writes the address where every `ray.init()` of this machine looks for one.
    monkeypatch.setattr(ray._private.utils, "write_ray_address", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    head = {**NODE, "resources": {RAY_RESOURCE_EXPLORER: CONFIG.explorers}}
    with small_ray():
        cluster = Cluster(True, head_node_args={**head, "include_dashboard": False})
    try:
        yield Pods(cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """These processes do nothing in the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_run_that_loses_a_trainers_pod_goes_on_in_the_pod_that_takes_its_place(
    ray_pods: Pods, tmp_path: Any
) -> None:
    run = Run(tmp_path, ray_pods.address)
    (tmp_path / "memory").mkdir()
    run.environment |= {
        env.POD_REPLACEMENT_SECONDS: "120",
        env.CHECKPOINT_INTERVAL: "1",
        env.CHECKPOINT_MEMORY: "64Mi",
        env.CHECKPOINT_MEMORY_DIR: str(tmp_path / "memory"),
    }
    process = run.start("tiny_grpo.train", config=SMALL)
    wait_until(lambda: max(run.committed, default=0) >= 5)
    # They may wait for weights that are lost with the trainer: no batch comes, and no call of the
    # trainers is due that would tell the driver of the loss.
    with stopped(run.started[0].explorer_pids):
        wait_until(lambda: time.time() - run.history.stat().st_mtime > QUIET_SECONDS)
        ray_pods.lose()
        ray_pods.replace()
        wait_until(lambda: "start in new pods" in run.log.read_text())
    assert run.end(process) == 0, run.log.read_text()[-6000:]
    first, second = run.started
    assert (first.step, second.attempt) == (0, 0)
    assert second.step >= 5
    assert {step.step for step in run.steps} == set(range(1, STEPS + 1))
    assert max(step.metrics["probe_max_abs_diff"] for step in run.steps) <= PROBE_TOLERANCE

    # And where none comes in time, the loss is told of.
    ray.init(address=ray_pods.address, log_to_driver=False)
    places = RankPlaces(nodes=[ray_pods.lose()])
    lost = PodLostError("the pod of a rank is gone")
    wait_until(lambda: _is_dead(places.nodes[0]))
    with pytest.raises(PodLostError) as told:
        await_pods(RankPlaces(nodes=[*places.nodes, *_trainers()]), lost, 1.0, RAY_RESOURCE_TRAINER)
    assert told.value is lost


def _is_dead(node: str) -> bool:
    return any(one["NodeID"] == node and not one["Alive"] for one in ray.nodes())


def _trainers() -> list[str]:
    """Nodes of trainers that live."""
    return [
        one["NodeID"]
        for one in ray.nodes()
        if one["Alive"] and one["Resources"].get(RAY_RESOURCE_TRAINER)
    ]
