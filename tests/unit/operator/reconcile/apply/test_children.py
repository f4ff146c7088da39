"""Children are put right, adopted or left alone; claims stay as people made them."""

import copy

import pytest
from trainsync.api import names
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import (
    CHILDREN,
    CLAIM,
    DEPLOYMENT,
    RAY_CLUSTER,
    RAY_JOB,
    RUN,
    SERVICE_ACCOUNT,
    Kind,
)
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.reconcile import Reconciler

from tests.unit.operator.fake_api import FakeApi, events_of, refuse
from tests.unit.operator.reconcile.world import CLAIMED, KEY, Clock, Ignore, World
from tests.unit.operator.support import UID, raw_run, seconds, spec


async def test_the_claim_of_an_older_release_loses_its_owner_and_outlives_the_run() -> None:
    world = World(spec(checkpoint=CLAIMED))
    await world.calm()
    (claim,) = world.api.all(CLAIM)
    assert "ownerReferences" not in claim["metadata"]
    owner = {"kind": RUN.name, "name": "tiny", "uid": UID, "controller": True}
    claim["metadata"]["ownerReferences"] = [owner]
    claim["metadata"]["annotations"][names.ANNOTATION_HASH] = "of-an-older-release"
    world.api.writes.clear()
    await world.calm()
    assert ("apply", CLAIM, "tiny-checkpoints") in world.api.writes


class Dropping(FakeApi):
    """Drops a field of a RayCluster as the API server does, and keeps what has not changed."""

    async def apply(self, kind: Kind, obj: Object) -> Object:
        if kind is not RAY_CLUSTER:
            return await super().apply(kind, obj)
        kept = copy.deepcopy(obj)
        del kept["spec"]["headGroupSpec"]["template"]["spec"]["nodeSelector"]
        live = self.objects.get((kind, obj["metadata"]["namespace"], obj["metadata"]["name"]))
        if live is None or live["spec"] != kept["spec"]:
            return await super().apply(kind, kept)
        self.writes.append(("apply", kind, obj["metadata"]["name"]))
        return live


async def test_a_field_that_the_api_server_drops_is_not_applied_at_each_look() -> None:
    clock = Clock()
    api = Dropping(clock)
    api.put(RUN, raw_run())
    head = {"template": {"spec": {"nodeSelector": None, "containers": [{"name": "ray"}]}}}
    api.run()["spec"]["clusters"][0]["head"] = head
    reconciler = Reconciler(api, Ignore(), MonitorSettings("monitor:1"), clock)
    for _ in range(4):
        await reconciler.reconcile(KEY)
    api.writes.clear()
    await reconciler.reconcile(KEY)
    assert not api.writes
    api.run()["spec"]["clusters"][0]["groups"][1]["replicas"] = 3
    await reconciler.reconcile(KEY)
    assert ("apply", RAY_CLUSTER, "tiny-main-0") in api.writes, "an edit is applied still"


@pytest.mark.parametrize("before", [None, "{}", "3", "what?", '{"format": "v0", "spec.sync": ""}'])
async def test_children_of_another_release_of_the_operator_are_left_running(
    before: str | None,
) -> None:
    world = World()
    await world.running()
    for obj in (*world.api.all(RAY_CLUSTER), *world.api.all(RAY_JOB)):
        obj["metadata"]["annotations"].pop(names.ANNOTATION_MADE_FROM)
        if before is not None:
            obj["metadata"]["annotations"][names.ANNOTATION_MADE_FROM] = before
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    world.api.run()["spec"]["sync"] = {"interval": 7}
    await world.running()
    assert world.jobs() == ["tiny-main-1"], "it is known by now"


async def test_a_changed_child_is_put_right() -> None:
    world = World()
    await world.running()
    (deployment,) = world.api.all(DEPLOYMENT)
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    (cluster,) = world.api.all(RAY_CLUSTER)
    cluster["spec"]["workerGroupSpecs"][1]["replicas"] = 9
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "monitor:1"
    (cluster,) = world.api.all(RAY_CLUSTER)
    assert cluster["spec"]["workerGroupSpecs"][1]["replicas"] == 2


async def test_a_child_whose_labels_and_owner_were_taken_is_adopted_again() -> None:
    world = World()
    await world.running()
    (deployment,) = world.api.all(DEPLOYMENT)
    deployment["metadata"]["ownerReferences"] = []
    await world.calm()
    (deployment,) = world.api.all(DEPLOYMENT)
    assert objects.controller(deployment) is not None


async def test_an_object_of_another_owner_is_not_touched_and_the_status_names_it() -> None:
    world = World()
    foreign = {"metadata": {"name": "tiny-monitor", "namespace": "team", "labels": {"a": "b"}}}
    world.api.put(SERVICE_ACCOUNT, foreign)
    assert await world.calm() == 5
    ready = world.status["conditions"][0]
    assert ready["reason"] == "NameTaken"
    assert "ServiceAccount tiny-monitor" in ready["message"]
    assert objects.controller(world.api.all(SERVICE_ACCOUNT)[0]) is None
    assert events_of(world.api).count("NameTaken") == 1


async def test_children_of_a_deleted_run_of_the_same_name_are_waited_for() -> None:
    world = World()
    await world.running()
    old = world.api.run()
    world.api.put(RUN, raw_run(uid="second"))
    again = await world.calm()
    assert again == 1
    assert world.status["conditions"][0]["reason"] == "Deleting"
    for (kind, namespace, name), obj in list(world.api.objects.items()):
        owner = objects.owner(obj, RUN.name)
        if owner is not None and owner["uid"] == old["metadata"]["uid"]:
            del world.api.objects[kind, namespace, name]
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    owner = objects.owner(world.api.all(RAY_JOB)[0], RUN.name)
    assert owner is not None
    assert owner["uid"] == "second"
    controller = objects.controller(world.api.all(RAY_JOB)[0])
    assert controller is not None
    assert controller["uid"] == world.api.all(RAY_CLUSTER)[0]["metadata"]["uid"]


async def test_the_orphaned_job_of_a_namesake_does_not_complete_the_run() -> None:
    going = {"storage": {"volumeClaimTemplate": {"size": "1Gi", "retentionPolicy": "Delete"}}}
    world = World(spec(checkpoint=going))
    await world.running()
    world.kuberay.end_job(0, "SUCCEEDED")
    for kind in CHILDREN:  # kubectl delete trainingrun --cascade=orphan
        for obj in world.api.all(kind):
            del obj["metadata"]["ownerReferences"]
    world.clock.now += seconds(60)
    second = raw_run(spec(checkpoint=going), uid="second")
    second["metadata"]["creationTimestamp"] = "2026-01-01T00:01:00Z"
    world.api.put(RUN, second)
    await world.running()
    ready = world.status["conditions"][0]
    assert ready["reason"] == "NameTaken"
    assert "RayCluster tiny-main-0 exists and does not belong to this run" in ready["message"]
    assert world.true_conditions() == set()
    owner = objects.controller(world.api.all(CLAIM)[0])
    assert owner is not None
    assert owner["uid"] == "second", "what was trained is there for the new run"
    world.api.remove(RAY_CLUSTER, "tiny-main-0")
    world.api.remove(RAY_JOB, "tiny-main-0")
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    assert "Complete" not in world.true_conditions()


async def test_pods_of_an_earlier_run_of_the_same_name_are_not_counted() -> None:
    world = World()
    await world.calm()
    world.kuberay.settle()
    for pod in world.api.objects.values():
        if names.LABEL_ROLE in objects.labels(pod) and "containers" in pod.get("spec", {}):
            pod["metadata"]["ownerReferences"] = [{"uid": "old", "controller": True}]
    await world.calm()
    assert world.jobs() == []
    assert "0 of 2 pods" in world.status["conditions"][0]["message"]


async def test_a_claim_that_somebody_has_grown_is_not_shrunk_and_attempts_go_on() -> None:
    world = World(spec(checkpoint=CLAIMED, failurePolicy={"backoffSeconds": 0}))
    await world.running()

    def no_shrinking(verb: str, kind: Kind, name: str) -> None:
        if kind is CLAIM:
            raise refuse(422, "field can not be less than previous value")

    world.api.before_write = no_shrinking
    (claim,) = world.api.all(CLAIM)
    claim["spec"]["resources"]["requests"]["storage"] = "2Gi"
    world.kuberay.end_job(0, "FAILED")
    await world.running()
    assert world.jobs() == ["tiny-main-0", "tiny-main-1"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"


async def test_a_terminating_claim_says_so_and_backs_off() -> None:
    world = World(spec(checkpoint=CLAIMED))
    await world.running()
    (claim,) = world.api.all(CLAIM)
    claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    waits = []
    for _ in range(4):
        waits.append(await world.calm())
        world.clock.now += seconds(30)
    assert waits == [1, 15, 30, 45]
    ready = world.status["conditions"][0]
    assert ready["reason"] == "ClaimTerminating"
    assert "PersistentVolumeClaim tiny-checkpoints is being deleted" in ready["message"]
    world.clock.now += seconds(3600)
    assert await world.calm() == 120


async def test_a_claim_is_made_from_the_template_and_not_for_an_existing_one() -> None:
    world = World()
    await world.calm()
    assert world.api.all(CLAIM) == []
