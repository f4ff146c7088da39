"""A run's monitor through its life: its image, its place among those replaced, its end."""

from trainsync.api import names
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import (
    DEPLOYMENT,
    ROLE,
    ROLE_BINDING,
    RUN,
)
from trainsync_operator.reconcile.apply.monitor_rollouts import PLACE_FOR, MonitorRollouts
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.run import Key

from tests.unit.operator.fake_api import FakeApi, KubeRay
from tests.unit.operator.reconcile.world import KEY, Clock, Ignore, World
from tests.unit.operator.support import raw_run, seconds, spec


async def test_a_monitor_with_a_time_of_its_own_goes_after_it() -> None:
    world = World(spec(monitor={"ttlSecondsAfterFinished": 60}))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 1
    world.clock.now += seconds(60)
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 0


async def test_the_monitor_of_a_finished_run_goes_after_an_hour() -> None:
    world = World(spec(ttlSecondsAfterFinished=60))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    world.clock.now += seconds(60)
    assert await world.calm() == 3540
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 1
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "monitor:0"
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "monitor:0", "a new default image does not replace it"
    world.clock.now += seconds(3540)
    assert await world.calm() is None
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 0


async def test_a_monitor_of_an_image_that_is_not_allowed_is_refused_and_says_the_remedy() -> None:
    world = World(spec(monitor={"image": "other.example/monitor:1"}))
    await world.calm()
    assert world.api.all(DEPLOYMENT) == []
    assert world.jobs() == []
    ready = objects.condition(world.api.run(), "Ready")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert ready["message"] == (
        "spec.monitor.image: other.example/monitor:1 is not allowed here, where monitors come from"
        " monitor: leave the field out, name an image from there, or have an administrator add"
        " other.example/monitor to monitorImage.allowed of the operator's chart."
    )


async def test_a_monitor_keeps_its_image_when_a_new_operator_does_not_allow_it_any_more() -> None:
    world = World(spec(monitor={"image": "other.example/monitor:1"}))
    older = MonitorSettings("monitor:1", allowed=("*",))
    for _ in range(3):
        await Reconciler(world.api, Ignore(), older, world.clock).reconcile(KEY)
    await world.running()
    world.kuberay.kill("Trainer")
    await world.calm()
    world.clock.now += seconds(60)
    world.kuberay.settle()
    await world.calm()
    assert world.jobs() == ["tiny-main-1"]


async def test_a_run_of_a_release_with_a_role_for_each_run_is_taken_over() -> None:
    world = World()
    await world.running()
    for binding in world.api.all(ROLE_BINDING):
        world.api.remove(ROLE_BINDING, objects.name(binding))
    reference = {"apiGroup": ROLE.group, "kind": "Role", "name": "tiny-monitor"}
    owner = objects.metadata(world.api.all(DEPLOYMENT)[0])["ownerReferences"]
    for kind, body in ((ROLE, {"rules": []}), (ROLE_BINDING, {"roleRef": reference})):
        meta = {
            "name": "tiny-monitor",
            "namespace": "team",
            "labels": {names.LABEL_RUN: "tiny"},
            "ownerReferences": owner,
        }
        world.api.put(kind, {"metadata": meta, **body})
    world.api.writes.clear()
    await world.calm()
    assert [(verb, kind) for verb, kind, _ in world.api.writes] == [("apply", ROLE_BINDING)]
    bound = {objects.name(obj): obj["roleRef"] for obj in world.api.all(ROLE_BINDING)}
    assert bound.pop("tiny-monitor") == reference  # it goes with the run
    (new,) = bound.values()
    assert new["kind"] == "ClusterRole"
    assert world.status["phase"] in ("Starting", "Running")


async def test_of_monitors_with_an_old_image_ten_are_replaced_at_a_time() -> None:
    clock = Clock()
    api = FakeApi(clock)
    kuberay = KubeRay(api)
    keys = [Key("team", f"run-{number}") for number in range(12)]
    for key in keys:
        api.put(RUN, raw_run(name=key.name, uid=f"uid-of-{key.name}"))

    woken: list[Key] = []

    async def look(image: str) -> Reconciler:
        reconciler = Reconciler(api, Ignore(), MonitorSettings(image), clock, wake=woken.append)
        for key in keys:
            for _ in range(3):
                await reconciler.reconcile(key)
        return reconciler

    def replaced() -> int:
        images = [
            obj["spec"]["template"]["spec"]["containers"][0]["image"] for obj in api.all(DEPLOYMENT)
        ]
        return images.count("monitor:2")

    await look("monitor:1")
    kuberay.settle()
    reconciler = await look("monitor:2")
    assert replaced() == 10
    clock.now += seconds(60)
    again = await reconciler.reconcile(keys[11])
    assert again is None or again > 60, "a run in the line is not looked at for nothing"
    assert replaced() == 10, "none of them is ready yet"
    assert not woken
    kuberay.settle()
    await reconciler.reconcile(keys[0])
    assert woken == [keys[10]], "the first in the line, and no other"
    await reconciler.reconcile(keys[11])
    assert replaced() == 10, "the place is kept for the run that was woken"
    await reconciler.reconcile(keys[10])
    assert replaced() == 11
    clock.now += PLACE_FOR - seconds(60)  # the others are not ready: the image may be a wrong one
    await reconciler.reconcile(keys[1])
    assert woken == [keys[10], keys[11]]
    await reconciler.reconcile(keys[11])
    assert replaced() == 12


async def test_the_place_of_a_run_that_is_deleted_or_needs_none_is_the_next_ones() -> None:
    now, woken = Clock().now, list[int]()
    rolls: MonitorRollouts[int] = MonitorRollouts(woken.append)
    assert [rolls.may(number, now) for number in range(13)] == [True] * 10 + [False] * 3
    rolls.done(10, now)  # it went while it waited
    rolls.done(3, now)
    assert woken == [11]
    rolls.done(11, now)  # edited back meanwhile
    assert woken == [11, 12]
    assert rolls.due(12, now) == [now + PLACE_FOR]
    assert rolls.due(3, now) == []
