"""An operator that dies before or after any write changes nothing of how a run goes."""

from collections.abc import Callable
from typing import Any

import pytest
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import (
    RAY_JOB,
    Kind,
)

from tests.unit.operator.fake_api import Crash
from tests.unit.operator.reconcile.world import World
from tests.unit.operator.support import seconds, spec


def _story() -> list[Callable[[World], None]]:
    """What happens to a run from outside, one thing after the other."""

    def later(world: World) -> None:
        world.clock.now += seconds(60)

    return [
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.end_job(0, "FAILED"),
        later,
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.kill("Trainer"),
        later,
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.kill("Head"),
        later,
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.settle(),
        lambda w: w.kuberay.end_job(3, "SUCCEEDED"),
        later,
        later,
    ]


async def _play(world: World) -> None:
    await world.calm()
    for step in _story():
        step(world)
        await world.calm()


def _guard(world: World) -> None:
    """No job may be made for an attempt that is not remembered, nor beside one that still runs."""
    inner = world.api.before_write

    def check(verb: str, kind: Kind, name: str) -> None:
        inner(verb, kind, name)
        if kind is RAY_JOB and verb == "apply":
            assert name == f"tiny-main-{world.status['attempt']}"
            others = [
                objects.name(j)
                for j in world.api.all(RAY_JOB)
                if objects.name(j) != name
                and j.get("status", {}).get("jobDeploymentStatus") not in ("Failed", "Complete")
            ]
            assert others == []

    world.api.before_write = check


def _final(world: World) -> tuple[Any, ...]:
    status = {k: v for k, v in world.status.items() if k != "conditions"}
    truth = [(c["type"], c["status"], c["reason"]) for c in world.status["conditions"]]
    return status, truth, world.jobs(), world.clusters()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_operator_that_dies_at_any_write_goes_on_as_if_nothing_had_been(
    when: str,
) -> None:
    untouched = World(spec(ttlSecondsAfterFinished=60))
    _guard(untouched)
    await _play(untouched)
    expected, writes = _final(untouched), len(untouched.api.writes)
    assert expected[0]["attempt"] == 3
    assert ("Complete", "True", "JobSucceeded") in expected[1]

    for death in range(writes):
        world = World(spec(ttlSecondsAfterFinished=60))
        _guard(world)
        _die_at(world, death, when)
        await world_calm_after_crash(world)
        for step in _story():
            step(world)
            await world_calm_after_crash(world)
        assert _final(world) == expected, f"died {when} write {death}"


def _die_at(world: World, death: int, when: str) -> None:
    count = 0
    guard = world.api.before_write

    def die(*arguments: Any) -> None:
        nonlocal count
        if when == "before":
            guard(*arguments)
        count += 1
        if count == death + 1:
            raise Crash

    if when == "before":
        world.api.before_write = die
    else:
        world.api.after_write = die


async def world_calm_after_crash(world: World) -> None:
    try:
        await world.calm()
    except Crash:
        await world.calm()
