"""The example with other methods and styles of weight sync, set only in the TrainingRun."""

from typing import Any

import pytest
from trainsync.api import names

from demo.cli import MANIFEST, load_run
from demo.platform import Platform
from tests.e2e import harness

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 12
SYNCS: dict[str, dict[str, Any]] = {
    "nccl": {"method": "nccl", "style": "explorer_driven", "interval": 2},
    "checkpoint": {"method": "checkpoint", "style": "trainer_driven", "interval": 2},
    "memory": {"method": "memory", "style": "fully_async", "maxStaleness": 2, "delta": True},
}


@pytest.mark.parametrize("method", SYNCS)
def test_the_example_runs_to_its_end_and_explorers_compute_what_the_trainer_does(
    method: str, platform: Platform
) -> None:
    manifest = load_run(MANIFEST)
    manifest["metadata"]["name"] = f"sync-{method}"
    manifest["spec"]["sync"] = {"timeoutSeconds": 60, **SYNCS[method]}
    manifest["spec"]["ttlSecondsAfterFinished"] = 0
    (cluster,) = manifest["spec"]["clusters"]
    cluster["entrypoint"] = f"python -m tiny_grpo.train --steps {STEPS}"
    platform.kubectl.apply(platform.fit(manifest), namespace=harness.NAMESPACE)
    run = harness.Run(platform, f"sync-{method}")
    try:
        end = run.wait_complete(300)
        assert (end.restarts, end.step, end.version) == (0, STEPS, STEPS)
        assert (end.explorers, end.lag) == (2, 0), "an explorer did not get the last weights"
        assert end.metrics["probe_max_abs_diff"] <= end.metrics["probe_tolerance"]
        versions = {seen.version for seen in run.seen if seen.version is not None}
        assert len(versions) > 1, "the weights' progress was not in the status"
        raw = platform.kubectl.get(names.PLURAL, run.name, harness.NAMESPACE) or {}
        assert raw["status"]["weights"]["method"] == method
        assert run.committed()[-1] == STEPS
        run.verify()
    finally:
        run.delete()
