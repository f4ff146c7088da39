"""What is refused or cannot be read is told once, in the run's status and as an Event."""

import itertools

import pytest
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiRefusedError
from trainsync_operator.kube.kinds import (
    DEPLOYMENT,
    EVENT,
    RUN,
    Kind,
)
from trainsync_operator.reconcile.reconcile import Reconciler

from tests.unit.operator.fake_api import events_of, refuse
from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import raw_run, seconds, spec


async def test_a_refused_child_is_reported_and_tried_again() -> None:
    world = World()

    def no_deployments(verb: str, kind: Kind, name: str) -> None:
        if kind is DEPLOYMENT:
            raise refuse(403, "exceeded quota")

    world.api.before_write = no_deployments
    with pytest.raises(ApiRefusedError):
        await world.calm()
    ready = world.status["conditions"][0]
    assert (ready["reason"], ready["status"]) == ("Refused", "False")
    assert "exceeded quota" in ready["message"]
    world.api.before_write = lambda *_: None
    await world.running()
    assert world.jobs() == ["tiny-main-0"]


async def test_a_refusal_whose_text_varies_is_one_event_that_counts() -> None:
    world = World()
    requests = itertools.count(1)

    def no_deployments(verb: str, kind: Kind, name: str) -> None:
        if kind is DEPLOYMENT:
            raise refuse(403, f"exceeded quota (request {next(requests)})")

    world.api.before_write = no_deployments
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(5):
        with pytest.raises(ApiRefusedError):
            await reconciler.reconcile(KEY)
        world.clock.now += seconds(10)
    (event,) = [e for e in world.api.all(EVENT) if e["reason"] == "Refused"]
    assert event["count"] == 5
    assert event["series"] == {"count": 5, "lastObservedTime": "2026-01-01T00:00:40.000000Z"}
    assert event["firstTimestamp"] == "2026-01-01T00:00:00Z"
    assert event["lastTimestamp"] == "2026-01-01T00:00:40Z"
    assert "request 5" in event["message"]


async def test_a_refusal_after_a_quiet_hour_is_an_event_of_its_own() -> None:
    world = World()

    def no_deployments(verb: str, kind: Kind, name: str) -> None:
        if kind is DEPLOYMENT:
            raise refuse(403, f"exceeded quota at {world.clock.now}")

    world.api.before_write = no_deployments
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(2):
        with pytest.raises(ApiRefusedError):
            await reconciler.reconcile(KEY)
        world.clock.now += seconds(3600)
    assert [e["count"] for e in world.api.all(EVENT) if e["reason"] == "Refused"] == [1, 1]


async def test_a_run_of_which_nothing_is_seen_is_neither_ready_nor_not() -> None:
    world = World()
    await world.running()
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    phase = world.status["phase"]
    await reconciler.unable(KEY, "API server answered 500: failed calling webhook")
    for condition in world.status["conditions"][:2]:
        assert condition["status"] == "Unknown"
        assert condition["reason"] == "ApiServerFails"
        assert "failed calling webhook. The operator tries again." in condition["message"]
    assert world.status["phase"] == phase
    await world.calm()
    assert {c["status"] for c in world.status["conditions"]} == {"True", "False"}
    world.api.remove(RUN, "tiny")
    await reconciler.unable(KEY, "whatever")


async def test_a_crd_that_is_older_than_the_operator_is_told_of_in_one_event() -> None:
    world = World()

    def no_such_field(verb: str, kind: Kind, name: str) -> None:
        if verb == "status":
            raise refuse(500, ".status.activeSince: field not declared in schema")

    world.api.before_write = no_such_field
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(3):
        with pytest.raises(ApiRefusedError):
            await reconciler.unable(KEY, "the status is refused")
    told = [event for event in world.api.all(EVENT) if event["reason"] == "CRDOutdated"]
    assert len(told) == 1
    assert "Apply crds/trainsync.dev_trainingruns.yaml" in told[0]["message"]


async def test_a_crd_that_lacks_a_field_of_a_whole_status_alone_is_told_of_too() -> None:
    world = World()
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(2):
        await reconciler.unable(KEY, "500: .status.pods: field not declared in schema")
    told = [event for event in world.api.all(EVENT) if event["reason"] == "CRDOutdated"]
    assert len(told) == 1


async def test_a_runtime_environment_that_is_no_yaml_is_said_to_be_so() -> None:
    broken = spec()
    broken["clusters"][0]["runtimeEnvYAML"] = "env_vars: [unclosed"
    world = World(broken)
    await world.calm()
    world.kuberay.settle()
    await world.calm()
    ready = world.status["conditions"][0]
    assert ready["reason"] == "InvalidSpec"
    assert "spec.clusters[main].runtimeEnvYAML" in ready["message"]


async def test_a_run_whose_first_look_was_refused_begins_when_it_is_mended() -> None:
    world = World(spec(sync={"method": "telepathy"}))
    await world.calm()
    assert "startTime" not in world.status
    world.api.run()["spec"] = spec()
    world.clock.now += seconds(60)
    await world.running()
    assert world.status["startTime"] == "2026-01-01T00:01:00Z"
    assert events_of(world.api)[0] == "Created"


async def test_fields_of_a_newer_crd_are_ignored_and_that_is_said_once() -> None:
    newer = spec(futureField=1)
    newer["clusters"][0]["groups"][0]["futureField"] = {"deep": True}
    world = World(newer)
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    for _ in range(3):
        await reconciler.reconcile(KEY)
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    ignored = [e for e in world.api.all(EVENT) if e["reason"] == "FieldsIgnored"]
    assert "spec.futureField" in ignored[0]["message"]
    assert "spec.clusters[0].groups[0].futureField" in ignored[0]["message"]
    assert ignored[0]["count"] == 1


async def test_a_run_that_went_unseen_is_forgotten() -> None:
    world = World(spec(futureField=1))
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)
    await reconciler.reconcile(KEY)
    world.api.remove(RUN, "tiny")
    await reconciler.reconcile(KEY)
    # The same words of another run of that name are told again, by an operator that forgot them.
    world.api.put(RUN, raw_run(spec(futureField=1)))
    for event in world.api.all(EVENT):
        world.api.remove(EVENT, objects.name(event))
    await reconciler.reconcile(KEY)
    assert "FieldsIgnored" in events_of(world.api)


async def test_a_value_of_a_newer_crd_is_refused_with_the_field() -> None:
    world = World(spec(futureField=1, sync={"method": "telepathy"}))
    await world.calm()
    ready = next(c for c in world.status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "InvalidSpec"
    assert "spec.sync.method" in ready["message"]
    assert world.clusters() == []
