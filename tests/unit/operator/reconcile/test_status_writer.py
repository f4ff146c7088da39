"""A status is written to the run that was read, and to no other."""

from collections.abc import Callable
from typing import Any

import pytest
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube.client import ApiError
from trainsync_operator.kube.kinds import (
    RUN,
    Kind,
)
from trainsync_operator.reconcile.reconcile import Reconciler

from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import raw_run


async def test_the_status_of_a_run_that_was_replaced_meanwhile_is_not_written() -> None:
    world = World()
    await world.running()
    world.kuberay.end_job(0, "FAILED")

    def replaced(verb: str, kind: Kind, name: str) -> None:
        if verb == "status" and world.api.run()["metadata"]["uid"] != "second":
            world.api.put(RUN, raw_run(uid="second"))

    world.api.before_write = replaced
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    with pytest.raises(ApiError):
        await reconciler.reconcile(KEY)
    assert world.status == {}


async def test_a_write_of_the_monitor_between_read_and_write_costs_one_more_read() -> None:
    world = World()
    conflicts: list[str] = []

    def monitor_writes(verb: str, kind: Kind, name: str) -> None:
        if verb == "status" and len(conflicts) < 2:
            conflicts.append(name)
            world.status["progress"] = {"step": len(conflicts)}
            world.api.put(RUN, world.api.run())

    world.api.before_write = monitor_writes
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    assert await reconciler.reconcile(KEY) is None
    assert world.status["phase"] == "Pending", "it was written by the first reconcile"
    assert world.status["progress"] == {"step": 2}


def _edited(raw: dict[str, Any]) -> None:
    raw["metadata"]["generation"] = 2


def _attempt_moved(raw: dict[str, Any]) -> None:
    raw["status"]["attempt"] = 5


@pytest.mark.parametrize("change", [_edited, _attempt_moved])
async def test_a_status_refused_because_the_run_moved_on_is_no_success(
    change: Callable[[dict[str, Any]], None],
) -> None:
    world = World()
    await world.running()
    world.kuberay.end_job(0, "FAILED")

    def moved(verb: str, kind: Kind, name: str) -> None:
        if verb == "status":
            change(world.api.run())
            world.api.put(RUN, world.api.run())

    world.api.before_write = moved
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    with pytest.raises(ApiError, match="changed since it was read"):
        await reconciler.reconcile(KEY)
    assert world.status["restarts"] == 0


async def test_a_run_that_changed_meanwhile_is_looked_at_again() -> None:
    world = World()
    moved: list[str] = []

    def move(verb: str, kind: Kind, name: str) -> None:
        if verb == "status" and not moved:
            moved.append(name)
            world.api.put(RUN, world.api.run())  # the monitor wrote its part

    world.api.before_write = move
    await world.running()
    assert moved
    assert world.jobs() == ["tiny-main-0"]
