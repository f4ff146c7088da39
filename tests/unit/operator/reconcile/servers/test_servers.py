"""Servers of a run: children that outlive its attempts."""

import json
from typing import Any

import pytest
from trainsync.api import names
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiRefusedError
from trainsync_operator.kube.kinds import (
    BUDGET,
    DEPLOYMENT,
    EVENT,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    RUN,
    SERVICE,
    Kind,
)
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.apply.rejected_requests import AGAIN_SECONDS
from trainsync_operator.reconcile.reconcile import Reconciler

from tests.unit.operator.fake_api import events_of
from tests.unit.operator.reconcile.test_reads import Counted
from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import seconds, with_servers

ROLLOUT = "tiny-server-rollout"
OF_SERVERS = (DEPLOYMENT, SERVICE, BUDGET)


def entries(*servers: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = with_servers(*servers)["servers"]
    return found


def edit(world: World, **changes: Any) -> None:
    run = world.api.run()
    run["spec"] = {**run["spec"], **changes}
    run["metadata"]["generation"] += 1
    world.api.put(RUN, run)


def children(world: World, kind: Kind = DEPLOYMENT) -> list[str]:
    found = (objects.name(obj) for obj in world.api.all(kind))
    return sorted(name for name in found if "-server-" in name)


def live(world: World, name: str = ROLLOUT) -> Object:
    return world.api.objects[DEPLOYMENT, "team", name]


def condition(world: World) -> dict[str, Any] | None:
    return objects.condition({"status": world.status}, "ServersReady")


async def training(*servers: dict[str, Any], **changes: Any) -> World:
    world = World(with_servers(*servers, **changes))
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    return world


async def test_each_entry_has_its_children_and_the_status_tells_of_them() -> None:
    world = World(with_servers({"name": "rollout", "replicas": 2}, {"name": "judge"}))
    await world.calm()
    for kind in OF_SERVERS:
        assert children(world, kind) == ["tiny-server-judge", ROLLOUT]
    found = condition(world)
    assert found is not None
    assert (found["status"], found["reason"]) == ("False", "NotAllReady")
    assert "Servers rollout: 0 of 2 are ready" in found["message"]
    world.kuberay.settle()
    await world.calm()
    found = condition(world)
    assert found is not None
    assert (found["status"], found["reason"]) == ("True", "AllReady")
    assert world.status["readyServers"] == "3/3"
    rollout = world.status["servers"][0]
    assert (rollout["name"], rollout["replicas"], rollout["readyReplicas"]) == ("rollout", 2, 2)
    assert rollout["url"] == f"http://{ROLLOUT}.team.svc:8000"
    assert events_of(world.api).count("ServersCreated") == 2


async def test_a_run_without_servers_has_no_such_condition_and_no_such_field() -> None:
    world = World()
    await world.running()
    assert condition(world) is None
    assert not {"servers", "readyServers"} & world.status.keys()


async def test_a_run_without_servers_is_not_asked_for_any() -> None:
    world = Counted()
    for _ in range(3):
        await world.look()
        world.kuberay.settle()
    assert BUDGET.plural not in world.reads
    monitors = ["get"] * (world.reads.count(DEPLOYMENT.plural))
    assert len(monitors) <= 2, "its monitor's, before it was made, and to make it"


async def test_servers_that_nothing_happens_to_cost_no_request() -> None:
    world = Counted(with_servers({"name": "rollout"}))
    await world.trains()
    await world.look()
    world.reads.clear()
    world.api.writes.clear()
    world.clock.now += seconds(3600)
    await world.look()
    assert (world.reads, world.api.writes) == ([], [])


async def test_what_the_api_server_writes_in_another_way_is_applied_once() -> None:
    world = Counted(with_servers({"name": "rollout"}))
    apply = world.api.apply

    async def stored(kind: Kind, obj: Object) -> Object:
        if kind is not DEPLOYMENT or objects.name(obj) != ROLLOUT:
            return await apply(kind, obj)
        before = world.api.objects.get((kind, "team", ROLLOUT))
        same = before is not None and before["metadata"]["annotations"] == objects.annotations(obj)
        if same and before is not None:
            world.api.writes.append(("apply", kind, ROLLOUT))
            return json.loads(json.dumps(before))  # type: ignore[no-any-return]
        made = json.loads(json.dumps(obj))
        made["spec"]["template"]["spec"]["containers"][0]["env"][0].pop("value")
        return await apply(kind, made)

    world.api.apply = stored  # type: ignore[method-assign]
    await world.trains()
    await world.look()
    world.api.writes.clear()
    for _ in range(3):
        await world.look()
    assert world.api.writes == []
    live(world)["spec"]["strategy"] = {"type": "Recreate"}
    live(world)["metadata"]["generation"] += 1
    world.api.put(DEPLOYMENT, live(world))
    await world.look()
    assert ("apply", DEPLOYMENT, ROLLOUT) in world.api.writes


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 4},
        {"replicas": 0},
        {"port": 9000},
        {"maxStaleness": 7},
        {"template": {"spec": {"containers": [{"name": "vllm", "image": "vllm:2"}]}}},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_change_of_servers_starts_no_attempt_and_leaves_every_ray_pod(
    change: dict[str, Any],
) -> None:
    world = await training({"name": "rollout", "replicas": 1})
    before = {objects.name(pod): objects.metadata(pod)["uid"] for pod in world.api.all(POD)}
    edit(world, servers=entries({"name": "rollout", "replicas": 1, **change}, {"name": "more"}))
    await world.calm()
    world.kuberay.settle()
    await world.calm()
    after = {objects.name(pod): objects.metadata(pod)["uid"] for pod in world.api.all(POD)}
    assert before == after
    assert (world.jobs(), world.status["attempt"]) == (["tiny-main-0"], 0)
    assert children(world) == ["tiny-server-more", ROLLOUT]


async def test_servers_outlive_the_attempt() -> None:
    world = await training({"name": "rollout"})
    uid = objects.metadata(live(world))["uid"]
    for role in ("Trainer", "Head"):
        world.kuberay.kill(role)
        await world.calm()
        world.clock.now += seconds(1000)
        world.kuberay.settle()
        await world.calm()
    assert world.status["attempt"] > 0
    assert objects.metadata(live(world))["uid"] == uid
    assert live(world)["metadata"]["generation"] == 1, "no pod was replaced"


@pytest.mark.parametrize("kind", OF_SERVERS, ids=lambda kind: kind.name)
async def test_a_child_that_is_deleted_or_changed_is_put_right(kind: Kind) -> None:
    world = await training({"name": "rollout"})
    world.api.remove(kind, ROLLOUT)
    await world.calm()
    child = world.api.objects[kind, "team", ROLLOUT]
    wanted = json.loads(json.dumps(child["spec"]))
    child["spec"]["selector"] = {"a": "b"}
    await world.calm()
    assert world.api.objects[kind, "team", ROLLOUT]["spec"] == wanted


async def test_an_entry_that_is_removed_takes_its_children_and_no_others() -> None:
    world = await training({"name": "rollout"}, {"name": "judge"})
    edit(world, servers=entries({"name": "judge"}))
    await world.calm()
    for kind in OF_SERVERS:
        assert children(world, kind) == ["tiny-server-judge"]
    assert len(world.api.all(DEPLOYMENT)) == 2, "the monitor's stays"
    assert events_of(world.api).count("ServersRemoved") == 1
    edit(world, servers=[])
    await world.calm()
    assert not any(children(world, kind) for kind in OF_SERVERS)
    assert condition(world) is None
    assert "servers" not in world.status
    assert world.jobs() == ["tiny-main-0"]


async def test_the_children_of_another_run_stay() -> None:
    world = await training({"name": "rollout"})
    other = json.loads(json.dumps(live(world)))
    other["metadata"] |= {"name": "tiny-server-x", "ownerReferences": [
        {"apiVersion": RUN.api_version, "kind": "Other", "name": "x", "uid": "x",
         "controller": True}]}  # fmt: skip
    world.api.put(DEPLOYMENT, other)
    await world.calm()
    assert children(world) == [ROLLOUT, "tiny-server-x"]


@pytest.mark.parametrize("replicas", [None, 3])
async def test_a_suspension_gives_the_servers_back_and_they_return(replicas: int | None) -> None:
    entry = {"name": "rollout"} if replicas is None else {"name": "rollout", "replicas": replicas}
    world = await training(entry, suspendPolicy={"saveDeadlineSeconds": 0})
    if replicas is None:
        live(world)["spec"]["replicas"] = 3  # by a HorizontalPodAutoscaler
        world.api.put(DEPLOYMENT, live(world))
        await world.calm()
        assert live(world)["spec"]["replicas"] == 3
    edit(world, suspend=True)
    await world.calm()
    assert world.status["phase"] == "Suspended"
    assert live(world)["spec"]["replicas"] == 0
    assert children(world, SERVICE) == [ROLLOUT], "its address stays"
    found = condition(world)
    assert found is not None
    assert (found["status"], found["reason"]) == ("False", "Suspended")
    edit(world, suspend=False)
    await world.calm()
    assert live(world)["spec"]["replicas"] == 3
    live(world)["spec"]["replicas"] = 2
    world.api.put(DEPLOYMENT, live(world))
    await world.calm()
    assert live(world)["spec"]["replicas"] == (2 if replicas is None else 3)


async def test_servers_serve_until_the_ray_clusters_of_a_finished_run_go() -> None:
    world = await training({"name": "rollout", "replicas": 2}, ttlSecondsAfterFinished=60)
    world.kuberay.end_job(0, "SUCCEEDED")
    await world.calm()
    assert "Complete" in world.true_conditions()
    edit(world, servers=entries({"name": "rollout", "replicas": 5}))
    await world.calm()
    assert live(world)["spec"]["replicas"] == 2, "what has ended is left as it is"
    world.clock.now += seconds(61)
    await world.calm()
    world.kuberay.settle()
    await world.calm()
    assert world.api.all(RAY_CLUSTER) == []
    assert live(world)["spec"]["replicas"] == 0
    found = condition(world)
    assert found is not None
    assert (found["status"], found["reason"]) == ("False", "Finished")


async def test_a_pod_that_cannot_start_is_told_of() -> None:
    world = await training({"name": "rollout"})
    live(world)["status"] = {"observedGeneration": 1, "updatedReplicas": 1}
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    world.api.put(
        POD,
        {
            "metadata": {
                "name": "p",
                "namespace": "team",
                "labels": objects.labels(live(world)["spec"]["template"]),
            },
            "spec": {"containers": [{"name": "vllm"}]},
            "status": {
                "phase": "Pending",
                "containerStatuses": [{"name": "vllm", "state": {"waiting": waiting}}],
            },
        },
    )
    await world.calm()
    (entry,) = world.status["servers"]
    assert entry["message"] == "Pod p: ImagePullBackOff: no such image"
    found = condition(world)
    assert found is not None
    assert found["message"].endswith(entry["message"])
    assert world.status["problem"] == "ImagePullBackOff"
    assert "Ready" in world.true_conditions(), "the trainers do not wait for servers"


async def test_a_deployment_that_can_make_no_pod_is_told_of() -> None:
    world = await training({"name": "rollout"})
    failed = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    live(world)["status"] = {"observedGeneration": 1, "conditions": [failed]}
    await world.calm()
    assert "exceeded quota" in world.status["servers"][0]["message"]


async def test_what_is_refused_of_one_entry_stops_neither_training_nor_the_others() -> None:
    world = World(with_servers({"name": "rollout"}, {"name": "judge"}))

    def refusing(verb: str, kind: Kind, name: str) -> None:
        if (verb, kind, name) == ("apply", DEPLOYMENT, ROLLOUT):
            raise ApiRefusedError(422, "spec.template: nonsense")

    world.api.before_write = refusing
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    assert "Ready" in world.true_conditions()
    assert children(world) == ["tiny-server-judge"]
    found = condition(world)
    assert found is not None
    assert found["reason"] == "Refused"
    assert "nonsense" in found["message"]
    refused = [event for event in world.api.all(EVENT) if event["reason"] == "Refused"]
    assert len(refused) == 1
    world.api.before_write = lambda *_: None
    await world.calm()
    assert children(world) == ["tiny-server-judge", ROLLOUT]


async def test_a_refusal_whose_text_varies_is_not_asked_for_at_each_look() -> None:
    world, refused = await training(), list[str]()

    def refusing(verb: str, kind: Kind, name: str) -> None:
        if (verb, kind, name) == ("apply", DEPLOYMENT, ROLLOUT):
            refused.append(name)
            raise ApiRefusedError(403, f"exceeded quota (request {len(refused)})")

    world.api.before_write = refusing
    reconciler = Reconciler(world.api, Ignore(), MonitorSettings("monitor:1"), world.clock)

    async def looks() -> None:
        for _ in range(4):
            await reconciler.reconcile(KEY)

    edit(world, servers=entries({"name": "rollout"}))
    await looks()
    assert len(refused) == 1
    world.clock.now += seconds(AGAIN_SECONDS)
    await looks()
    assert len(refused) == 2
    edit(world, servers=entries({"name": "rollout", "replicas": 2}))
    await looks()
    assert len(refused) == 3, "another spec is asked for at once"


async def test_a_template_that_is_none_is_told_of_and_training_goes_on() -> None:
    world = await training({"name": "rollout", "template": {"spec": {
        "containers": [{"name": "a", "image": "b", "env": "x"}]}}})  # fmt: skip
    found = condition(world)
    assert found is not None
    assert found["reason"] == "InvalidSpec"
    assert "spec.servers[rollout].template" in found["message"]
    assert len(world.api.all(RAY_JOB)) == 1


async def test_a_name_that_is_taken_is_told_of_and_nothing_of_others_is_touched() -> None:
    world = World(with_servers({"name": "rollout"}))
    taken = {"metadata": {"name": ROLLOUT, "namespace": "team"}, "spec": {}}
    world.api.put(SERVICE, taken)
    await world.running()
    found = condition(world)
    assert found is not None
    assert found["reason"] == "NameTaken"
    assert world.jobs() == ["tiny-main-0"]
    assert names.LABEL_RUN not in objects.labels(world.api.objects[SERVICE, "team", ROLLOUT])
