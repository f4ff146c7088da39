"""An edit of what runs begins a new attempt, and any other takes effect at once."""

from collections.abc import Callable
from typing import Any

import pytest
from trainsync_operator.kube.kinds import (
    EVENT,
    POD,
    RAY_CLUSTER,
)

from tests.unit.operator.fake_api import events_of
from tests.unit.operator.reconcile.world import World


async def test_changing_the_spec_of_a_finished_run_does_nothing_and_says_so() -> None:
    world = World()
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    world.api.run()["spec"]["clusters"][0]["image"] = "ray:2"
    world.api.run()["metadata"]["generation"] = 2
    await world.calm()
    assert "SpecIgnored" in events_of(world.api)
    (cluster,) = world.api.all(RAY_CLUSTER)
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == "ray:1"


def _cluster_of(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.api.run()["spec"]["clusters"][0]
    return found


def _edit_image(world: World) -> None:
    _cluster_of(world)["image"] = "ray:2"


def _edit_template(world: World) -> None:
    template = {"spec": {"containers": [{"name": "ray", "env": [{"name": "A", "value": "1"}]}]}}
    _cluster_of(world)["groups"][1]["template"] = template


def _edit_sync(world: World) -> None:
    world.api.run()["spec"]["sync"] = {"interval": 7}


def _edit_interval(world: World) -> None:
    world.api.run()["spec"]["checkpoint"]["interval"] = 7


def _edit_entrypoint(world: World) -> None:
    _cluster_of(world)["entrypoint"] = "python -m other"


def _edit_environment(world: World) -> None:
    _cluster_of(world)["runtimeEnvYAML"] = "env_vars: {A: '1'}"


@pytest.mark.parametrize(
    ("edit", "field", "clusters"),
    [
        (_edit_image, "spec.clusters[main]", ["tiny-main-1"]),
        (_edit_template, "spec.clusters[main]", ["tiny-main-1"]),
        (_edit_sync, "spec.sync", ["tiny-main-1"]),
        (_edit_interval, "spec.checkpoint", ["tiny-main-1"]),
        (_edit_entrypoint, "spec.clusters[main].entrypoint", ["tiny-main-0"]),
        (_edit_environment, "spec.clusters[main].runtimeEnvYAML", ["tiny-main-0"]),
    ],
)
async def test_an_edit_of_what_runs_begins_a_new_attempt_that_is_no_restart(
    edit: Callable[[World], None], field: str, clusters: list[str]
) -> None:
    world = World()
    await world.running()
    edit(world)
    await world.running()
    assert world.jobs() == ["tiny-main-1"]
    assert world.clusters() == clusters
    assert world.status["restarts"] == 0
    (told,) = [e for e in world.api.all(EVENT) if e["reason"] == "Restarting"]
    assert told["type"] == "Normal"
    assert f"ended (SpecChanged). Edited: {field}." in told["message"]


async def test_an_edited_image_mends_a_run_that_does_not_start() -> None:
    world = World()
    await world.calm()
    for pod in world.api.all(POD):
        pod["status"]["phase"] = "Pending"
    _edit_image(world)
    await world.calm()
    assert world.clusters() == ["tiny-main-1"]
    (cluster,) = world.api.all(RAY_CLUSTER)
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == "ray:2"


def _edit_replicas(world: World) -> None:
    _cluster_of(world)["groups"][1]["replicas"] = 3


def _edit_retention(world: World) -> None:
    checkpoint = world.api.run()["spec"]["checkpoint"]
    checkpoint |= {"maxToKeep": 2, "saveTimeoutSeconds": 60, "verify": "digest"}


def _edit_policy(world: World) -> None:
    world.api.run()["spec"] |= {"failurePolicy": {"maxRestarts": 9}, "monitor": {"image": "m:2"}}


def _write_defaults(world: World) -> None:
    world.api.run()["spec"] |= {"sync": {"interval": 1, "method": "memory"}}
    _cluster_of(world)["head"] = {"rayStartParams": {}}


@pytest.mark.parametrize("edit", [_edit_replicas, _edit_retention, _edit_policy, _write_defaults])
async def test_an_edit_that_holds_at_once_does_not_end_the_attempt(
    edit: Callable[[World], None],
) -> None:
    world = World()
    await world.running()
    edit(world)
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    assert "Restarting" not in events_of(world.api)
