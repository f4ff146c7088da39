"""Explorers in a Ray cluster of their own follow the trainers by way of the run's monitor."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from trainsync import RunContext, WeightPublisher
from trainsync.api import env
from trainsync.engines.module_engine import TrainedModule
from trainsync.runtime.errors import JoinError
from trainsync.weights.synchronizer.roster import STOPPED

from tests.distributed.processes.forked_workers import forked_python
from tests.distributed.weights.synchronizer.actor_deaths import sigkill
from tests.ports import port_of, reserved_port
from tests.unit.monitor.fakes import NAMESPACE, UID, FakeApi, RunningMonitor, Signer
from tests.waiting import eventually

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray_cluster"),
]

SECONDS = 90.0


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer()


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Of the one trainer, which is the driver."""
    with reserved_port() as reservation:
        method = f"tcp://127.0.0.1:{port_of(reservation)}"
        dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Explorer:
    """The process of an explorer, and the versions that it has served."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._lines: Queue[str] = Queue()
        self.process = subprocess.Popen(
            [*forked_python(), "-m", "tests.distributed.weights.far_explorer"],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def served(self) -> Any:
        """The next version that it serves, and the first value of each tensor."""
        return json.loads(self._lines.get(timeout=SECONDS))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)


def environment(url: str, token: Path, directory: Path, method: str) -> dict[str, str]:
    return {
        env.RUN_NAME: f"run-{directory.parent.name}",
        env.RUN_NAMESPACE: NAMESPACE,
        env.RUN_UID: UID,
        env.CLUSTER: "main",
        env.TRAINER_CLUSTER: "main",
        env.ATTEMPT: "0",
        env.MONITOR_URL: url,
        env.TOKEN_FILE: str(token),
        env.CHECKPOINT_DIR: str(directory),
        env.SYNC_METHOD: method,
        env.SYNC_TIMEOUT_SECONDS: "90",
    }


def explorers(ctx: RunContext) -> dict[str, int]:
    """What each serves, as the Synchronizer knows."""
    status = ray.get(ctx.synchronizer().get_status.remote(), timeout=SECONDS)
    return {name: each.version for name, each in status.explorers.items()}


@pytest.mark.parametrize("method", ["checkpoint", "nccl"])
def test_an_explorer_elsewhere_takes_each_version_whatever_dies_on_the_way(
    method: str, signer: Signer, tmp_path: Path
) -> None:
    api = FakeApi(signer)
    there = [{"name": name, "attempt": 0} for name in ("main", "far")]
    api.run = {**api.run, "status": {"attempt": 0, "clusters": there}}
    (token := tmp_path / "token").write_text(signer.token())
    monitor = RunningMonitor(api, tmp_path / "run")
    port = monitor.process.port
    assert port is not None
    variables = environment(monitor.url, token, tmp_path / "run", method)
    model = torch.nn.Linear(3, 2)
    explorer = Explorer(variables | {env.CLUSTER: "far"})
    options: dict[str, Any] = {"shared_memory": False} if method == "nccl" else {}
    try:
        with RunContext.from_env(environ=variables) as ctx:
            ctx.synchronizer()
            with WeightPublisher(ctx, TrainedModule(model), **options) as publisher:

                def publish(version: int) -> None:
                    torch.nn.init.constant_(model.weight, version)
                    torch.nn.init.constant_(model.bias, -version)
                    publisher.publish(version)

                def takes(version: int) -> None:
                    values = {"weight": float(version), "bias": float(-version)}
                    assert explorer.served() == [version, values]

                # What is broadcast before an explorer is there does not come to it.
                eventually(lambda: "far" in explorers(ctx), SECONDS)
                publish(1)
                takes(1)
                sigkill(ctx.synchronizer())
                publish(2)
                takes(2)
                monitor.stop()
                monitor = RunningMonitor(api, tmp_path / "run", port=port)
                publish(3)
                takes(3)
                eventually(lambda: explorers(ctx) == {"far": 3}, SECONDS)
                ray.get(ctx.synchronizer().set_trainer_status.remote(STOPPED), timeout=SECONDS)
                assert explorer.process.wait(SECONDS) == 0
    finally:
        explorer.process.kill()
        explorer.process.wait()
        monitor.stop()


def test_batches_do_not_leave_their_cluster(signer: Signer, tmp_path: Path) -> None:
    variables = environment("http://127.0.0.1:1", tmp_path, tmp_path, "nccl")
    far = RunContext.from_env(
        environ=variables | {env.CLUSTER: "far", env.INCARNATION: "0123456789ab"}
    )
    with pytest.raises(JoinError, match="batches do not leave a Ray cluster"):
        far.pace_trainer(print, step=0)
