"""The example with other methods and styles of weight sync, set only in the TrainingRun."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from trainsync.api import names

from demo.cli import MANIFEST, load_run
from demo.platform import Platform
from demo.snapshot import Snapshot
from tests.e2e import harness

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 12
SECONDS = 480
SYNCS: dict[str, dict[str, Any]] = {
    "nccl": {"method": "nccl", "style": "explorer_driven", "interval": 2},
    "checkpoint": {"method": "checkpoint", "style": "trainer_driven", "interval": 2},
    "memory": {"method": "memory", "style": "fully_async", "maxStaleness": 2, "delta": True},
}


@dataclass
class Started:
    """A run, and how it ends, which a thread watches."""

    run: harness.Run
    end: Future[Snapshot]


@pytest.fixture(scope="module")
def started(platform: Platform) -> Iterator[dict[str, Started]]:
    """The runs of all methods at once: much of a run's start is waiting."""
    runs = {method: start(platform, method, sync) for method, sync in SYNCS.items()}
    with ThreadPoolExecutor(len(runs)) as watchers:
        try:
            yield {
                method: Started(run, watchers.submit(run.wait_complete, SECONDS))
                for method, run in runs.items()
            }
        finally:
            for run in runs.values():
                run.delete()


def start(platform: Platform, method: str, sync: dict[str, Any]) -> harness.Run:
    manifest = load_run(MANIFEST)
    manifest["metadata"]["name"] = f"sync-{method}"
    manifest["spec"]["sync"] = {"timeoutSeconds": 60, **sync}
    manifest["spec"]["ttlSecondsAfterFinished"] = 0
    (cluster,) = manifest["spec"]["clusters"]
    cluster["entrypoint"] = f"python -m tiny_grpo.train --steps {STEPS}"
    platform.kubectl.apply(platform.fit(manifest), namespace=harness.NAMESPACE)
    return harness.Run(platform, f"sync-{method}")


@pytest.mark.parametrize("method", SYNCS)
def test_the_example_runs_to_its_end_and_explorers_compute_what_the_trainer_does(
    method: str, started: dict[str, Started], platform: Platform
) -> None:
    run, end = started[method].run, started[method].end.result()
    assert (end.restarts, end.step, end.version) == (0, STEPS, STEPS)
    assert (end.explorers, end.lag) == (2, 0), "an explorer did not get the last weights"
    assert end.metrics["probe_max_abs_diff"] <= end.metrics["probe_tolerance"]
    versions = {seen.version for seen in run.seen if seen.version is not None}
    assert len(versions) > 1, "the weights' progress was not in the status"
    raw = platform.kubectl.get(names.PLURAL, run.name, harness.NAMESPACE) or {}
    assert raw["status"]["weights"]["method"] == method
    assert run.committed()[-1] == STEPS
    run.verify()
