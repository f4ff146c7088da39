"""The account of a run of real processes, whose monitor is replaced meanwhile."""

import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from trainsync import ExplorerClient, RunContext, Uploader
from trainsync.api import env
from trainsync.weights.pacing.loops import ExplorerPace

from tests.unit.monitor.fakes import NAMESPACE, UID, FakeApi, RunningMonitor, Signer
from tests.waiting import eventually

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("ray_cluster"),
]

STEPS = 10
TRAINS, ROLLS_OUT = 0.5, 0.4  # seconds of a step, and of a batch
WAIT = 90.0
ROUNDED = 2.0  # seconds that a sum loses: each of its four classes that are not 0 is rounded
LATE = 4.0  # seconds after which the monitor has seen a change of pods at the latest


class Explorer:
    """Rolls out in a process of its own."""

    def __init__(self, synchronizer: Any) -> None:
        self._client = ExplorerClient(synchronizer, "explorer-0", timeout=WAIT)
        self._pace = ExplorerPace(self._client, self._update, timeout=WAIT)

    def run(self) -> int:
        """Until training ends; returns the number of batches."""
        made = 0
        for turn in self._pace:
            time.sleep(ROLLS_OUT)  # a rollout
            self._pace.deliver(turn, turn.number)
            made += 1
        self._client.leave()
        return made

    def _update(self, version: int) -> int | None:
        weights = self._client.wait_and_fetch(version)
        if weights is None:
            return None
        self._client.acknowledge(weights)
        return weights.version


def set_pods(api: FakeApi, phase: str, held: int) -> None:
    """As the operator would: a pod of each role."""
    pods = [{"role": role, "held": held} for role in ("Trainer", "Explorer")]
    api.run = {**api.run, "status": {**api.run["status"], "phase": phase, "pods": pods}}


def classes(api: FakeApi) -> dict[str, dict[str, int]]:
    account = api.writes[-1][1].get("account", {"roles": []})
    return {role["role"]: role["classes"] for role in account["roles"]}


def spent(api: FakeApi, role: str) -> int:
    return sum(classes(api).get(role, {}).values())


def test_the_seconds_of_real_processes_are_in_their_classes(tmp_path: Path) -> None:
    signer = Signer()
    api = FakeApi(signer)
    set_pods(api, "Running", 1)
    (token := tmp_path / "token").write_text(signer.token())
    monitor = RunningMonitor(api, tmp_path / "run")
    port = monitor.process.port
    assert port is not None
    variables = {
        env.RUN_NAME: f"run-{tmp_path.name}",
        env.RUN_NAMESPACE: NAMESPACE,
        env.RUN_UID: UID,
        env.CLUSTER: "main",
        env.TRAINER_CLUSTER: "main",
        env.ATTEMPT: "0",
        env.MONITOR_URL: monitor.url,
        env.TOKEN_FILE: str(token),
        env.CHECKPOINT_DIR: str(tmp_path / "run"),
        env.SYNC_METHOD: "memory",
        env.SYNC_TIMEOUT_SECONDS: f"{WAIT:g}",
    }
    try:
        eventually(lambda: bool(api.writes), WAIT)  # it has seen the pods
        began = time.monotonic()
        with RunContext.from_env(environ=variables) as ctx:
            assert ctx.resume() is None
            synchronizer = ctx.synchronizer()
            actor: Any = ray.remote(Explorer).options(num_cpus=0)
            explorer = actor.remote(synchronizer)
            ray.get(explorer.__ray_ready__.remote(), timeout=WAIT)
            uploader = Uploader(0, 1)

            def publish(version: int) -> None:
                state = {"w": torch.full((10,), float(version))}
                uploader.upload(state, synchronizer, version, timeout=WAIT)

            pace = ctx.pace_trainer(publish, step=0)
            made = explorer.run.remote()
            for step in range(1, STEPS + 1):
                pace.next_batches()
                time.sleep(TRAINS)  # a step
                pace.trained(step)
                ctx.report(step, STEPS)
                if step == STEPS // 2:
                    away = time.monotonic()
                    monitor.stop()
                    monitor = RunningMonitor(api, tmp_path / "run", port=port)
                    replaced = time.monotonic() - away  # the loop did that, and did not wait
            pace.finish()
            ctx.report(STEPS, STEPS)
            batches = ray.get(made, timeout=WAIT)
        took = time.monotonic() - began
        set_pods(api, "Complete", 0)
        monitor.stop()  # and the next one sees a run that has ended
        monitor = RunningMonitor(api, tmp_path / "run", port=port)
        eventually(lambda: spent(api, "Trainer") >= took - ROUNDED, WAIT)
        eventually(lambda: spent(api, "Explorer") >= took - ROUNDED, WAIT)
    finally:
        monitor.stop()
    found = classes(api)
    for seconds in found.values():
        assert took - ROUNDED <= sum(seconds.values()) <= took + 2 * LATE, (found, took)
    trainer, rollouts = found["Trainer"], found["Explorer"]
    assert trainer["train"] == pytest.approx(STEPS * TRAINS + replaced, abs=2), (found, replaced)
    assert trainer["sync"] >= STEPS * ROLLS_OUT - 1, found
    assert (trainer["repeat"], trainer["queue"], trainer["save"]) == (0, 0, 0), found
    done = rollouts["generate"] + rollouts["stale"]
    assert done == pytest.approx(batches * ROLLS_OUT, abs=2), (found, batches)
