"""Trainers in one Ray cluster, explorers in another."""

import pytest
from trainsync.api import names

from demo.platform import Platform
from tests.e2e import harness
from tests.e2e.two_clusters_workload import STEPS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

# The CRD refuses `memory`, and `store` needs a bucket.
METHODS = ("nccl", "checkpoint")


def check(run: harness.Run, method: str) -> None:
    end = run.wait_complete(400)
    raw = run.kubectl.get(names.PLURAL, run.name, harness.NAMESPACE) or {}
    found = (end.restarts, end.step, end.version)
    assert found == (0, STEPS, STEPS), raw["status"].get("lastFailure")
    assert raw["status"]["weights"]["method"] == method
    # By `checkpoint` alone weights are files on the volume, which the clusters share.
    saved = run.committed_by("state_dict")
    assert max(saved, default=None) == (STEPS if method == "checkpoint" else None)


def test_every_version_reaches_an_explorer_in_a_cluster_of_its_own_by_each_method(
    platform: Platform,
) -> None:
    runs = {method: harness.start_apart(platform, f"apart-{method}", method) for method in METHODS}
    try:
        for method, run in runs.items():
            check(run, method)
    finally:
        for run in runs.values():
            run.delete()
