"""A run without a queue whose RayClusters Kueue takes all the same."""

import copy
from typing import Any, Final

import pytest
from trainsync.api import names
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import POD, RAY_CLUSTER, RUN, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.run import QUEUE_LABEL

from tests.unit.operator.fake_api import FakeApi, KubeRay
from tests.unit.operator.reconcile.world import World
from tests.unit.operator.support import raw_run, seconds, spec

LABELS: Final = [{QUEUE_LABEL: "default"}, {}]
NAMES: Final = ["a default LocalQueue", "manageJobsWithoutQueueName"]
TOLERATION: Final = {"key": "gpu", "operator": "Exists"}


class Kueue(FakeApi):
    """Defaults of its webhooks at the creation of a RayCluster, which an apply leaves in place.

    Attributes:
        defaulted: labels that it sets.
        is_quick: a RayCluster is admitted before its creator writes to it again.
    """

    defaulted: dict[str, str] = LABELS[0]
    is_quick = False

    async def apply(self, kind: Kind, obj: Object) -> Object:
        before = await self.get(kind, obj["metadata"]["namespace"], objects.name(obj))
        applied = await super().apply(kind, obj)
        if kind is not RAY_CLUSTER:
            return applied
        live = self.objects[kind, "team", objects.name(obj)]
        live["metadata"]["labels"] |= self.defaulted
        live["spec"]["suspend"] = before is None or before["spec"]["suspend"]
        made = copy.deepcopy(live)
        if before is None and self.is_quick:
            self.admit()
        return made

    def admit(self) -> None:
        """Room is there: pods are made, with what their flavor asks for."""
        for ray in self.all(RAY_CLUSTER):
            ray["spec"]["suspend"] = False
            pod = ray["spec"]["headGroupSpec"]["template"]["spec"]
            pod["tolerations"] = [*pod["tolerations"], TOLERATION]
            self.put(RAY_CLUSTER, ray)

    def preempt(self) -> None:
        """Its room is taken, and its pods go."""
        for ray in self.all(RAY_CLUSTER):
            ray["spec"]["suspend"] = True
            self.put(RAY_CLUSTER, ray)
        for pod in self.all(POD):
            self.remove(POD, objects.name(pod))


class Queued(World):
    """A world whose Kueue takes what has no queue."""

    api: Kueue

    def __init__(self, defaulted: dict[str, str]) -> None:
        super().__init__()
        self.api = Kueue(self.clock)
        self.api.defaulted = defaulted
        self.kuberay = KubeRay(self.api)
        self.api.put(RUN, raw_run(spec(suspendPolicy={"saveDeadlineSeconds": 60})))

    def ready(self) -> dict[str, Any]:
        found = objects.condition(self.api.run(), "Ready")
        assert found is not None
        return found

    def pods(self) -> list[dict[str, Any]]:
        (ray,) = self.api.all(RAY_CLUSTER)
        groups = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
        return [group["template"]["spec"] for group in groups]

    def are_held(self) -> list[bool]:
        return ["preStop" in pod["containers"][0].get("lifecycle", {}) for pod in self.pods()]

    async def monitor_is_up(self) -> None:
        await self.calm()
        self.kuberay.settle()
        for pod in self.api.all(POD):
            self.api.remove(POD, objects.name(pod))
        await self.calm()


@pytest.fixture(params=LABELS, ids=NAMES)
def world(request: pytest.FixtureRequest) -> Queued:
    return Queued(request.param)


async def test_it_waits_as_queued_and_its_pods_are_held_when_they_are_taken(world: Queued) -> None:
    await world.monitor_is_up()
    assert world.ready()["reason"] == "Queued"
    assert "waits in its queue" in world.ready()["message"]
    assert world.status["problem"] == "Queued"
    assert world.are_held() == [True] * 3
    assert all(pod["terminationGracePeriodSeconds"] == 90 for pod in world.pods())
    assert world.jobs() == []
    world.clock.now += seconds(7200)
    await world.calm()
    assert (world.status["restarts"], "startingSince" in world.status) == (0, False)


async def test_it_is_held_before_another_write_and_before_any_pod(world: Queued) -> None:
    await world.calm()
    rays = [n for n, (_, kind, _) in enumerate(world.api.writes) if kind is RAY_CLUSTER]
    assert [n - rays[0] for n in rays] == [0, 1]


async def test_what_was_admitted_first_is_left_as_it_is_until_it_is_preempted(
    world: Queued,
) -> None:
    world.api.is_quick = True
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    assert world.are_held() == [False] * 3, "pods do not change while they run"
    world.api.preempt()
    await world.monitor_is_up()
    assert world.ready()["reason"] == "Queued"
    assert world.are_held() == [True] * 3
    assert (world.status["attempt"], world.status["restarts"]) == (1, 0)


async def test_it_runs_when_it_is_admitted_and_nothing_is_put_back(world: Queued) -> None:
    await world.monitor_is_up()
    world.api.admit()
    before = len(world.api.writes)
    await world.running()
    assert world.jobs() == ["tiny-main-0"]
    assert RAY_CLUSTER not in {kind for _, kind, _ in world.api.writes[before:]}
    assert TOLERATION in world.pods()[0]["tolerations"]
    assert "problem" not in world.status
    (ray,) = world.api.all(RAY_CLUSTER)
    assert objects.labels(ray).items() >= {names.LABEL_RUN: "tiny", **world.api.defaulted}.items()


async def test_where_no_queue_takes_it_its_pods_are_not_held() -> None:
    world = World(spec(suspendPolicy={"saveDeadlineSeconds": 60}))
    await world.running()
    (ray,) = world.api.all(RAY_CLUSTER)
    assert "lifecycle" not in str(ray["spec"])
