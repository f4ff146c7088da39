"""examples/vllm_grpo as its TrainingRun, with real vLLM servers in pods."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from trainsync.api import names

from demo import diagnose
from demo.adapt import Object, servers_for_devcluster
from demo.bucket import Bucket
from demo.cli import load_run
from demo.kubectl import wait_for
from demo.platform import REPOSITORY, Platform
from images.pod_env import MOUNT_PATH
from tests.e2e.command_line import CommandLine
from tests.e2e.harness import NAMESPACE, RELEASE
from tests.vllm.support.server import vllm_environment

MANIFEST: Final = REPOSITORY / "examples" / "vllm_grpo" / "trainingrun.yaml"
START_SECONDS: Final = 600
STEP_SECONDS: Final = 240
_MAP: Final = "vllm-workload"
_FOLDER: Final = "/workload"


class ServedRun:
    """The example's run, and what its status says.

    Args:
        options: of ``vllm serve``, beside the example's.
        workload: a program in place of the example's; its argument is the number of steps.
        bucket: for its checkpoints and versions; None: the example's volume.
        entry: fields of the entry of ``spec.servers`` that differ.

    Attributes:
        rewards: by step, of those that the status was seen at.
    """

    def __init__(
        self,
        platform: Platform,
        steps: int,
        options: Sequence[str] = (),
        *,
        workload: Path | None = None,
        bucket: Bucket | None = None,
        **entry: Any,
    ) -> None:
        self._kubectl = platform.kubectl
        self.rewards: dict[int, float] = {}
        run = load_run(MANIFEST)
        self.name: str = run["metadata"]["name"]
        (servers,) = run["spec"]["servers"]
        servers |= entry
        servers["template"]["spec"]["containers"][0]["command"] += options
        cluster = run["spec"]["clusters"][0]
        cluster["entrypoint"] = cluster["entrypoint"].replace("--steps 60", f"--steps {steps}")
        if workload is not None:
            self._mount(cluster, workload, steps)
        if bucket is not None:
            self._kubectl.apply(bucket.secret_object(), namespace=NAMESPACE)
            run = bucket.fit(run)
        run = servers_for_devcluster(run, platform.images.ray, vllm_environment(), MOUNT_PATH)
        self._kubectl.apply(platform.fit(run), namespace=NAMESPACE)

    def _mount(self, cluster: Object, workload: Path, steps: int) -> None:
        """Run a program of the tests in the head's pod."""
        data = {workload.name: workload.read_text()}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _MAP}, "data": data}
        self._kubectl.apply(made, namespace=NAMESPACE)
        cluster["entrypoint"] = f"python {_FOLDER}/{workload.name} {steps}"
        spec = cluster["head"]["template"]["spec"]
        spec["volumes"] = [{"name": _MAP, "configMap": {"name": _MAP}}]
        spec["containers"][0]["volumeMounts"] = [
            {"name": _MAP, "mountPath": _FOLDER, "readOnly": True}
        ]

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

    def until_step(self, step: int, seconds: float = STEP_SECONDS) -> None:
        def reached() -> bool:
            status = self.status()
            if status.get("phase") == "Failed" or status.get("restarts", 0):
                pytest.fail(f"the run failed:\n{self.report()}")
            return int((status.get("progress") or {}).get("step", 0)) >= step

        wait_for(reached, what=f"step {step}", seconds=seconds)

    def until_complete(self, steps: int) -> None:
        """Asserts that it ends in its first attempt, with no unproven token."""

        def complete() -> bool:
            self.until_step(0)
            return bool(self.status()["phase"] == "Complete")

        wait_for(complete, what="the run to be Complete", seconds=START_SECONDS)
        status = self.status()
        assert (status["attempt"], status["restarts"]) == (0, 0), "servers touch no attempt"
        assert status["progress"]["step"] == steps
        assert float(status["progress"]["metrics"]["unproven_tokens"]) == 0

    def servers(self) -> dict[str, dict[str, Any]]:
        """What the status says of each pod of servers."""
        weights: dict[str, Any] = self.status().get("weights") or {}
        return {server["name"]: server for server in weights.get("servers") or []}

    def version(self, pod: str) -> int:
        """That the server in a pod has, by the status; -1 for none."""
        found = self.servers().get(pod, {}).get("version")
        return -1 if found is None else int(found)

    def proven(self) -> set[str]:
        """Pods whose present weights are proven, by the status."""
        return {name for name, server in self.servers().items() if server["proven"]}

    def ready_pods(self) -> set[str]:
        """Names of the servers' pods that are ready."""
        return {
            pod["metadata"]["name"]
            for pod in self._pods()
            if any(
                (c["type"], c["status"]) == ("Ready", "True")
                for c in pod["status"].get("conditions") or []
            )
        }

    def uids(self) -> dict[str, str]:
        """Of the servers' pods, by name."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self._pods()}

    def _pods(self) -> list[dict[str, Any]]:
        """Those of servers that stay."""
        selector = f"{names.LABEL_RUN}={self.name},{names.LABEL_COMPONENT}=server"
        found = self._kubectl.objects("pods", NAMESPACE, selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

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

    def told(self, reason: str) -> bool:
        """Whether an Event of the run has this reason."""
        events = self._kubectl.objects("events", NAMESPACE)
        return any(
            (event["reason"], event["involvedObject"]["name"]) == (reason, self.name)
            for event in events
        )

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


@contextmanager
def told_of(run: ServedRun) -> Iterator[None]:
    """The run is deleted at the end of the block; an error in the block says what became of it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{error}\n{run.report()}") from error
    finally:
        run.delete()
