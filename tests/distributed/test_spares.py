"""Spare processes of the example's trainers: one that is not well is ended, and not used."""

import time
from typing import Any

import pytest
import ray
from tiny_grpo.ray_trainers import is_well

from tests.distributed.weights.synchronizer.actor_deaths import sigkill

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("ray_cluster"),
]


class Spare:
    """A spare whose start goes as the test says."""

    def warm(self, goes: str) -> None:
        if goes == "fails":
            raise RuntimeError("the GPU is not there")
        if goes == "hangs":
            time.sleep(600)  # longer than a test: it is to be ended


def started(goes: str) -> tuple[Any, Any]:
    spare: Any = ray.remote(Spare).options(num_cpus=0, max_concurrency=2).remote()
    ray.get(spare.warm.remote("well"))
    return spare, spare.warm.remote(goes)


def ends(spare: Any) -> bool:
    """Ray ends an actor a moment after `ray.kill` has returned."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            ray.get(spare.warm.remote("well"), timeout=30)
        except ray.exceptions.RayActorError:
            return True
    return False


def test_one_that_has_loaded_all_is_used() -> None:
    spare, warm = started("well")
    assert is_well(spare, warm, 30)
    ray.get(spare.warm.remote("well"), timeout=30)


@pytest.mark.parametrize("goes", ["fails", "hangs"])
def test_one_that_fails_or_hangs_is_ended(goes: str) -> None:
    spare, warm = started(goes)
    assert not is_well(spare, warm, 2)
    assert ends(spare)


@pytest.mark.parametrize("goes", ["well", "hangs"])
def test_one_that_was_killed_is_not_used(goes: str) -> None:
    """Whether it had loaded all, or was about to."""
    spare, warm = started(goes)
    if goes == "well":
        ray.get(warm)
    sigkill(spare)
    assert not is_well(spare, warm, 30)
