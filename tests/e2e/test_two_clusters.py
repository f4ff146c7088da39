"""Trainers in one Ray cluster, explorers in another."""

import pytest
from trainsync.api import names

from demo.platform import Platform
from tests.e2e import harness
from tests.e2e.two_clusters_workload import STEPS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

NAME, METHOD = "apart", "nccl"


def test_every_version_reaches_an_explorer_in_a_cluster_of_its_own(platform: Platform) -> None:
    """By `nccl`, which needs ways between the pods. `tests.distributed` tries `checkpoint`, and the
    CRD refuses `memory`."""
    run = harness.start_apart(platform, NAME, METHOD)
    try:
        end = run.wait_complete(400)
        raw = run.kubectl.get(names.PLURAL, run.name, harness.NAMESPACE) or {}
        found = (end.restarts, end.step, end.version)
        assert found == (0, STEPS, STEPS), raw["status"].get("lastFailure")
        assert raw["status"]["weights"]["method"] == METHOD
        assert not run.committed_by("state_dict"), "weights are no files on the volume"
    finally:
        run.delete()
