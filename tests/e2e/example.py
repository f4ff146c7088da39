"""The example as a run of its own, with another spec."""

from typing import Any

from trainsync.api import names

from demo.cli import MANIFEST, load_run
from demo.platform import Platform
from demo.snapshot import Snapshot
from tests.e2e import harness
from tests.ray_params import LITTLE_HEAD, LITTLE_RAY

# The model's size is the example's; no test here asks what it learns.
LITTLE_WORK = "--prompts 8 --group-size 4 --digits 2 --base-steps 4 --base-batch 16"


def start(
    platform: Platform, name: str, steps: int, options: str = "", replicas: int = 2, **spec: Any
) -> harness.Run:
    """Apply the example's TrainingRun.

    Args:
        replicas: trainers, and explorers.
        spec: fields that differ.
    """
    manifest = load_run(MANIFEST)
    manifest["metadata"]["name"] = name
    manifest["spec"] |= {"ttlSecondsAfterFinished": 0, **spec}
    (cluster,) = manifest["spec"]["clusters"]
    sizes = f"--steps {steps} --trainers {replicas} --explorers {replicas} {LITTLE_WORK}"
    cluster["entrypoint"] = f"python -m tiny_grpo.train {sizes} {options}".rstrip()
    cluster["head"]["rayStartParams"] = LITTLE_HEAD
    for group in cluster["groups"]:
        group["rayStartParams"] = {"num-cpus": "1", **LITTLE_RAY}
        group["replicas"] = replicas
    platform.kubectl.apply(platform.fit(manifest), namespace=harness.NAMESPACE)
    return harness.Run(platform, name)


def check_explorers(run: harness.Run, end: Snapshot, method: str, steps: int) -> None:
    """Both have the last weights, compute what the trainer does, and were seen on their way."""
    assert (end.step, end.version) == (steps, steps)
    assert (end.explorers, end.lag) == (2, 0), "an explorer did not get the last weights"
    assert end.metrics["probe_max_abs_diff"] <= end.metrics["probe_tolerance"]
    versions = {seen.version for seen in run.seen if seen.version is not None}
    assert len(versions) > 1, "the weights' progress was not in the status"
    raw = run.kubectl.get(names.PLURAL, run.name, harness.NAMESPACE) or {}
    assert raw["status"]["weights"]["method"] == method


def check_volume(run: harness.Run, steps: int) -> None:
    """The last step is committed, and every checkpoint on the volume verifies."""
    assert run.committed()[-1] == steps
    run.verify()


def loaded_bytes(run: harness.Run, source: str) -> float:
    """What the monitor was told of the ranks' loads."""
    read = "import urllib.request; print(urllib.request.urlopen('{}').read().decode())"
    text = run.in_monitor("python3", "-c", read.format("http://localhost:8080/metrics"))
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("trainsync_checkpoint_loaded_bytes_total{") and f'"{source}"' in line
    ]
    return float(line.rpartition(" ")[2])
