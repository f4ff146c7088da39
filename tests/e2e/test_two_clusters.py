"""Trainers in one Ray cluster, explorers in another."""

import pytest

from demo.platform import Platform
from tests.e2e import harness
from tests.e2e.two_clusters_workload import STEPS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_every_version_reaches_an_explorer_in_a_cluster_of_its_own(platform: Platform) -> None:
    run = harness.start_apart(platform, "apart", "nccl")
    try:
        end = run.wait_complete(300)
        assert (end.restarts, end.step, end.version) == (0, STEPS, STEPS)
    finally:
        run.delete()
