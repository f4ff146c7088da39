"""Helpers of the e2e tests: make a run, wait for it, read its volume."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainsync.api import names

from demo import diagnose
from demo.ending import last_words
from demo.errors import KubectlError
from demo.kubectl import Kubectl, Object
from demo.platform import Platform
from demo.snapshot import Snapshot, snapshot_of
from tests.ray_params import LITTLE_HEAD, LITTLE_RAY

NAMESPACE = "trainsync-e2e"
# The chart names its objects after the release if the release's name contains the chart's.
RELEASE = "trainsync-operator-e2e"
WORKLOAD = Path(__file__).with_name("workload.py")
TWO_CLUSTERS = Path(__file__).with_name("two_clusters_workload.py")
_WORKLOAD_DIRECTORY = "/opt/trainsync-e2e"
RAY_VERSION = "2.60.0"
_REQUESTS = {"requests": {"cpu": "50m", "memory": "128Mi"}}


class RunFailedError(AssertionError):
    """A run did not reach the awaited state; the message has diagnostics."""


@dataclass
class Run:
    """One TrainingRun of a test."""

    platform: Platform
    name: str
    seen: list[Snapshot] = field(default_factory=list)

    @property
    def kubectl(self) -> Kubectl:
        return self.platform.kubectl

    def wait(
        self, until: Callable[[Snapshot, Object], bool], what: str, seconds: float
    ) -> Snapshot:
        """Watch the run until the condition holds. Raises RunFailedError."""
        try:
            for raw in self.kubectl.watch(names.PLURAL, self.name, NAMESPACE, seconds):
                snapshot = snapshot_of(raw)
                self.seen.append(snapshot)
                if until(snapshot, raw):
                    return snapshot
                if snapshot.finished:
                    raise self.failed(f"it is {snapshot.phase} before {what}: {snapshot.message}")
        except KubectlError as error:
            raise self.failed(f"waited for {what}: {error}") from error
        raise self.failed(f"it is gone before {what}")

    def wait_complete(self, seconds: float = 180) -> Snapshot:
        """Wait until the run is Complete, and its monitor has told of that."""
        end = self.wait(lambda run, _: run.phase == "Complete", "it is Complete", seconds)
        return last_words(self.kubectl, self.name, NAMESPACE, end)

    def failed(self, why: str) -> RunFailedError:
        report = diagnose.report(self.kubectl, self.name, NAMESPACE, RELEASE)
        return RunFailedError(f"run {self.name}: {why}\n{report}")

    def in_monitor(self, *command: str) -> str:
        """Run a command in the monitor's pod, which mounts the volume."""
        deployment = f"deployment/{names.monitor_name(self.name)}"
        return self.kubectl.exec(deployment, NAMESPACE, *command, timeout=60)

    def journal(self) -> list[dict[str, Any]]:
        """The lines of the workload's journal, in order."""
        text = self.in_monitor("cat", f"{names.CHECKPOINT_MOUNT}/{self.name}.journal")
        return [json.loads(line) for line in text.splitlines()]

    def committed(self) -> list[int]:
        """Steps with a checkpoint manifest on the volume."""
        # Not `find`, which fails where a directory goes while it walks: a run may still save.
        pattern = f"{names.CHECKPOINT_MOUNT}/{self.name}/global_step_*/MANIFEST.checkpoint.json"
        found = self.in_monitor("sh", "-c", f"ls -d {pattern}")
        folders = [line.split("/")[-2] for line in found.splitlines()]
        return sorted(int(folder.removeprefix("global_step_")) for folder in folders)

    def committed_by(self, kind: str = "checkpoint") -> dict[int, int]:
        """The attempt that made each committed save of a kind on the volume, by step."""
        directory = f"{names.CHECKPOINT_MOUNT}/{self.name}"
        said = self.in_monitor("trainsync", "checkpoints", "ls", "--json", directory)
        saves = json.loads(said)["saves"]
        return {each["step"]: each["attempt"] for each in saves if each["kind"] == kind}

    def verify(self) -> None:
        """Check that every committed checkpoint on the volume verifies."""
        directory = f"{names.CHECKPOINT_MOUNT}/{self.name}"
        self.in_monitor("trainsync", "checkpoints", "verify", directory)

    def suspend(self, suspended: bool = True) -> None:
        """Set spec.suspend."""
        patch = json.dumps({"spec": {"suspend": suspended}})
        words = ("patch", names.PLURAL, self.name, "--type=merge", "-p", patch)
        self.kubectl.run("-n", NAMESPACE, *words)

    def delete(self) -> None:
        self.kubectl.delete(names.PLURAL, self.name, NAMESPACE)


def start(platform: Platform, name: str, *arguments: str, **spec: Any) -> Run:
    """Apply a TrainingRun of the workload."""
    command = f"python {_WORKLOAD_DIRECTORY}/{WORKLOAD.name} {' '.join(arguments)}"
    platform.kubectl.apply(
        workload_map(), platform.fit(training_run(name, command, **spec)), namespace=NAMESPACE
    )
    return Run(platform, name)


def start_apart(platform: Platform, name: str, method: str) -> Run:
    """Apply a TrainingRun with a trainer and an explorer in a cluster each."""
    command = f"python {_WORKLOAD_DIRECTORY}/{TWO_CLUSTERS.name}"
    manifest = training_run(name, f"{command} train", trainers=1)
    other = training_run(name, f"{command} explore", trainers=0, explorers=1)
    (far,) = other["spec"]["clusters"]
    manifest["spec"]["clusters"].append({**far, "name": "far"})
    manifest["spec"]["sync"] = {"method": method, "timeoutSeconds": 120}
    platform.kubectl.apply(workload_map(), platform.fit(manifest), namespace=NAMESPACE)
    return Run(platform, name)


def training_run(
    name: str,
    entrypoint: str,
    *,
    trainers: int = 2,
    explorers: int = 0,
    interval: int = 4,
    failure_policy: Object | None = None,
    pod: Object | None = None,
) -> Object:
    """A TrainingRun with the workload in its head; ``pod`` is merged into each pod's spec."""

    def template(mounts_workload: bool) -> Object:
        node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        container: Object = {"name": "ray", "resources": _REQUESTS, "env": [node]}
        spec: Object = {"containers": [container], **(pod or {})}
        if mounts_workload:
            mount = {"name": "workload", "mountPath": _WORKLOAD_DIRECTORY, "readOnly": True}
            container["volumeMounts"] = [mount]
            spec["volumes"] = [{"name": "workload", "configMap": {"name": "workload"}}]
        return {"spec": spec}

    groups = {"Trainer": trainers, "Explorer": explorers}
    cluster = {
        "name": "main",
        "rayVersion": RAY_VERSION,
        "entrypoint": entrypoint,
        "head": {"rayStartParams": LITTLE_HEAD, "template": template(True)},
        "groups": [
            {
                "name": role.lower(),
                "role": role,
                "replicas": replicas,
                "rayStartParams": LITTLE_RAY,
                "template": template(False),
            }
            for role, replicas in groups.items()
            if replicas
        ],
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "clusters": [cluster],
            "checkpoint": {
                "storage": {"volumeClaimTemplate": {"size": "1Gi", "retentionPolicy": "Delete"}},
                "interval": interval,
                "verify": "digest",
            },
            "failurePolicy": {"backoffSeconds": 1, **(failure_policy or {})},
            "ttlSecondsAfterFinished": 0,
        },
    }


def assert_one_training_at_a_time(journal: list[dict[str, Any]]) -> None:
    """Incarnations did not interleave, and each attempt had one that trained."""
    order: list[tuple[int, str]] = []
    for line in sorted(journal, key=lambda line: float(line["time"])):
        who = (line["attempt"], line["incarnation"])
        if not order or order[-1] != who:
            order.append(who)
    assert len(order) == len(set(order)), f"two trainings ran at once: {order}"
    attempts = [attempt for attempt, _ in order]
    assert attempts == sorted(set(attempts)), f"an attempt was trained twice: {order}"


def assert_steps_follow_commits(journal: list[dict[str, Any]], interval: int) -> None:
    """Every attempt takes consecutive steps, from a step that may be committed."""
    by_attempt: dict[int, list[dict[str, Any]]] = {}
    for line in journal:
        by_attempt.setdefault(line["attempt"], []).append(line)
    for attempt, lines in by_attempt.items():
        first = int(lines[0]["step"])
        assert lines[0]["event"] == "start"
        assert first % interval == 0, f"attempt {attempt} started from step {first}"
        steps = [line["step"] for line in lines if line["event"] == "step"]
        assert steps == list(range(first + 1, first + 1 + len(steps)))


def workload_map() -> Object:
    """The ConfigMap from which the pods have the workload."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "workload"},
        "data": {path.name: path.read_text() for path in (WORKLOAD, TWO_CLUSTERS)},
    }
