"""examples/vllm_grpo as its TrainingRun: real vLLM servers in pods, one killed, one scaled in."""

import json
from typing import Any

import pytest
from trainsync.api import names

from demo import diagnose
from demo.adapt import servers_for_devcluster
from demo.cli import load_run
from demo.kubectl import wait_for
from demo.platform import REPOSITORY, Platform
from images.pod_env import MOUNT_PATH
from tests.e2e.command_line import CommandLine
from tests.e2e.harness import NAMESPACE, RELEASE
from tests.vllm.server import vllm_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

MANIFEST = REPOSITORY / "examples" / "vllm_grpo" / "trainingrun.yaml"
_STEPS = 100
_RISE = 0.2
_START_SECONDS = 600
_STEP_SECONDS = 240
# vLLM may wait for ever for requests that its dead engine had: then the probe ends it, after 120 s
# and another 30 that it has to end by itself.
_RESTART_SECONDS = 200


class ServedRun:
    """The example's run, and what its status says.

    Attributes:
        rewards: by step, of those that the status was seen at.
    """

    def __init__(self, platform: Platform) -> None:
        self._kubectl = platform.kubectl
        self.rewards: dict[int, float] = {}
        run = load_run(MANIFEST)
        self.name: str = run["metadata"]["name"]
        self.deployment = names.server_name(self.name, run["spec"]["servers"][0]["name"])
        run["spec"]["servers"][0]["sync"] = {"fellows": True}
        cluster = run["spec"]["clusters"][0]
        cluster["entrypoint"] = cluster["entrypoint"].replace("--steps 60", f"--steps {_STEPS}")
        run = servers_for_devcluster(run, platform.images.ray, vllm_environment(), MOUNT_PATH)
        self._kubectl.apply(platform.fit(run), namespace=NAMESPACE)

    def status(self) -> dict[str, Any]:
        found = self._kubectl.get(names.PLURAL, self.name, NAMESPACE)
        assert found is not None, "the run is gone"
        status = dict(found.get("status") or {})
        progress = status.get("progress") or {}
        if "reward" in (metrics := progress.get("metrics") or {}):
            self.rewards[int(progress["step"])] = float(metrics["reward"])
        return status

    def step(self) -> int:
        return int((self.status().get("progress") or {}).get("step", 0))

    def until_step(self, step: int, seconds: float = _STEP_SECONDS) -> None:
        def reached() -> bool:
            status = self.status()
            if status.get("phase") == "Failed" or status.get("restarts", 0):
                pytest.fail(f"the run failed:\n{self.report()}")
            return int((status.get("progress") or {}).get("step", 0)) >= step

        wait_for(reached, what=f"step {step}", seconds=seconds)

    def servers(self) -> dict[str, dict[str, Any]]:
        """What the status says of each pod of servers."""
        weights: dict[str, Any] = self.status().get("weights") or {}
        return {server["name"]: server for server in weights.get("servers") or []}

    def proven(self) -> set[str]:
        """Pods whose present weights are proven, by the status."""
        return {name for name, server in self.servers().items() if server["proven"]}

    def ready_pods(self) -> set[str]:
        selector = f"{names.LABEL_RUN}={self.name},{names.LABEL_COMPONENT}=server"
        pods = self._kubectl.objects("pods", NAMESPACE, selector)
        return {
            pod["metadata"]["name"]
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
            and any(
                (c["type"], c["status"]) == ("Ready", "True")
                for c in pod["status"].get("conditions") or []
            )
        }

    def two_ready(self) -> list[str] | None:
        """The ready pods when they are two: one that lags behind is not ready for a moment."""
        pods = sorted(self.ready_pods())
        return pods if len(pods) == 2 else None

    def restarts(self, pod: str) -> int:
        """How often the server's container of a pod was started anew."""
        found = self._kubectl.get("pod", pod, NAMESPACE)
        assert found is not None, f"pod {pod} is gone"
        return int(found["status"]["containerStatuses"][0]["restartCount"])

    def bytes_of_fellows(self) -> float:
        """Bytes of versions that the agents of ready pods have taken from one another."""
        return sum(self._of_fellows(pod) for pod in self.ready_pods())

    def _of_fellows(self, pod: str) -> float:
        url = f"http://$TRAINSYNC_AGENT_HOST:{names.AGENT_PORT}/metrics"
        ask = f"import urllib.request as u; print(u.urlopen('{url}', timeout=10).read().decode())"
        words = ("exec", pod, "-c", "trainsync-agent", "--", "sh", "-c", f'python3 -c "{ask}"')
        text = self._kubectl.run("-n", NAMESPACE, *words, timeout=60)
        name = 'trainsync_agent_fetched_bytes_total{source="fellow"}'
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def proven_by_hand(self) -> bool:
        """Whether `trainsync run prove` has both servers proven; not while an update takes long."""
        command = CommandLine(self._kubectl.kubeconfig, NAMESPACE)
        try:
            told, _ = command("prove", self.name)
        except AssertionError:
            return False
        return told.count(" proven ") == 2

    def kill(self, pod: str) -> None:
        """SIGKILL to all processes of the server, whose first one ends with its workers."""
        words = ("exec", pod, "-c", "vllm", "--", "bash", "-c", "kill -9 -1")
        self._kubectl.run("-n", NAMESPACE, *words, timeout=30)

    def scale(self, replicas: int) -> None:
        patch = [{"op": "replace", "path": "/spec/servers/0/replicas", "value": replicas}]
        words = ("patch", names.PLURAL, self.name, "--type=json", "-p", json.dumps(patch))
        self._kubectl.run("-n", NAMESPACE, *words)

    def report(self) -> str:
        return diagnose.report(self._kubectl, self.name, NAMESPACE, RELEASE)

    def delete(self) -> None:
        self._kubectl.delete(names.PLURAL, self.name, NAMESPACE)


def test_training_goes_on_when_a_server_is_killed_and_one_scaled_in_and_no_token_is_unproven(
    platform: Platform,
) -> None:
    run = ServedRun(platform)
    try:
        play(run)
    except Exception as error:
        raise AssertionError(f"{error}\n{run.report()}") from error
    run.delete()


def play(run: ServedRun) -> None:
    run.until_step(1, _START_SECONDS)
    wait_for(run.two_ready, what="two ready servers", seconds=_START_SECONDS)
    wait_for(lambda: run.proven() == run.ready_pods(), what="the status to say so", seconds=30)

    wait_for(run.proven_by_hand, what="both servers to be proven by hand", seconds=120)
    wait_for(lambda: run.bytes_of_fellows() > 0, what="a version from a fellow", seconds=60)

    killed = wait_for(run.two_ready, what="two ready servers", seconds=60)[0]
    run.kill(killed)
    before = run.step()
    run.until_step(before + 2)  # with the other one
    what = f"{killed} to be started anew"
    wait_for(lambda: run.restarts(killed) == 1, what=what, seconds=_RESTART_SECONDS)
    wait_for(lambda: killed in run.ready_pods(), what=f"{killed} again", seconds=_START_SECONDS)
    wait_for(lambda: killed in run.proven(), what="its weights to be told of", seconds=30)

    run.scale(1)
    wait_for(lambda: len(run.ready_pods()) == 1, what="one server alone", seconds=120)
    assert run.restarts(next(iter(run.ready_pods()))) in (0, 1)
    run.until_step(min(run.step() + 4, _STEPS))

    def complete() -> bool:
        run.until_step(0)
        return run.status()["phase"] == "Complete"

    wait_for(complete, what="the run to be Complete", seconds=_START_SECONDS)
    status = run.status()
    assert (status["attempt"], status["restarts"]) == (0, 0), "servers touch no attempt"
    assert status["progress"]["step"] == _STEPS
    assert float(status["progress"]["metrics"]["unproven_tokens"]) == 0
    first, last = min(run.rewards), max(run.rewards)
    assert run.rewards[last] - run.rewards[first] >= _RISE, (first, last, run.rewards)
