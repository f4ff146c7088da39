"""Trainers in one Ray cluster, explorers in another."""

from collections.abc import Iterator

import pytest
from trainsync.api import names

from demo.platform import Platform
from tests.e2e import harness
from tests.e2e.two_clusters_workload import STEPS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

# The CRD refuses `memory`, and `store` needs a bucket.
METHODS = ("nccl", "checkpoint")


@pytest.fixture(scope="module")
def apart(platform: Platform) -> Iterator[dict[str, harness.Run]]:
    """A run of each method, side by side: a run waits for its pods most of its time."""
    runs: dict[str, harness.Run] = {}
    try:
        for method in METHODS:
            runs[method] = harness.start_apart(platform, f"apart-{method}", method)
        yield runs
    finally:
        for run in runs.values():
            run.delete()


@pytest.mark.parametrize("method", METHODS)
def test_every_version_reaches_an_explorer_in_a_cluster_of_its_own(
    apart: dict[str, harness.Run], method: str
) -> None:
    run = apart[method]
    end = run.wait_complete(300)
    assert (end.restarts, end.step, end.version) == (0, STEPS, STEPS)
    raw = run.kubectl.get(names.PLURAL, run.name, harness.NAMESPACE) or {}
    assert raw["status"]["weights"]["method"] == method
    # By `checkpoint` alone weights are files on the volume, which the clusters share.
    saved = run.committed_by("state_dict")
    assert max(saved, default=None) == (STEPS if method == "checkpoint" else None)
