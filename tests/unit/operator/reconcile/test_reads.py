"""What a reconcile reads from the store, and what from the API server alone."""

import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube.client import ApiError
from trainsync_operator.kube.kinds import DEPLOYMENT, POD, RAY_CLUSTER, RAY_JOB, RUN, SERVICE, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.trimmed import trim

from tests.unit.operator.reconcile.hostile_watch import HostileWatch
from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import seconds


class Counted(World):
    """A world with one operator that has a store, and a count of its reads."""

    def __init__(self, run_spec: dict[str, Any] | None = None) -> None:
        super().__init__(run_spec)
        self.reads: list[str] = []
        self.api.get = self._counting(self.api.get)  # type: ignore[method-assign]
        self.api.list = self._counting(self.api.list)  # type: ignore[method-assign]
        self.store = Store(trim)
        self.watch = HostileWatch(self.api, self.store, lambda *_: None)
        self.operator = Reconciler(
            self.api, Ignore(), MonitorSettings("monitor:1"), self.clock, store=self.store
        )

    def _counting(self, call: Callable[..., Awaitable[Any]]) -> Any:
        async def counted(kind: Kind, *arguments: Any) -> Any:
            self.reads.append(kind.plural)
            return await call(kind, *arguments)

        return counted

    async def look(self) -> float | None:
        """A reconcile, after all news has come."""
        self.watch.publish()
        self.watch.deliver()
        again = await self.operator.reconcile(KEY)
        self.watch.publish()
        return again

    async def trains(self) -> None:
        """Its job runs, and nothing is left to be done."""
        for _ in range(4):
            await self.look()
            self.kuberay.settle()
        await self.look()
        assert self.jobs() == ["tiny-main-0"]
        self.reads.clear()
        self.api.writes.clear()


async def test_a_run_that_nothing_happens_to_costs_no_request() -> None:
    world = Counted()
    await world.trains()
    world.clock.now += seconds(3600)
    await world.look()
    assert world.reads == []
    assert world.api.writes == []


async def test_nothing_is_polled_while_a_run_starts_or_restarts() -> None:
    world = Counted()
    await world.look()
    again = await world.look()
    assert again is None or again > 60, "its deadline alone"
    world.reads.clear()
    await world.look()
    assert world.reads == []


async def test_a_new_run_is_read_from_the_api_server_twice_and_not_for_each_event() -> None:
    world = Counted()
    await world.trains()
    fresh = Counted()
    for _ in range(8):
        await fresh.look()
        fresh.kuberay.settle()
    assert fresh.reads.count(RUN.plural) <= 3
    assert fresh.reads.count(POD.plural) == 1, "before the job is made"


async def test_a_new_run_gets_its_ray_cluster_before_its_monitor_so_that_others_get_theirs() -> (
    None
):
    world = Counted()
    assert await world.look() == 0.0
    assert world.reads == [RAY_CLUSTER.plural], "whether another owner has its name"
    assert world.api.all(RAY_CLUSTER)
    assert not world.api.all(DEPLOYMENT)
    await world.look()
    assert world.api.all(DEPLOYMENT)


async def test_a_job_of_which_nothing_was_heard_is_seen_before_another_begins() -> None:
    world = Counted()
    await world.look()
    await world.look()
    world.kuberay.settle()
    world.watch.publish()
    world.watch.deliver()

    def answer_is_lost(verb: str, kind: Kind, name: str) -> None:
        if kind is RAY_JOB:
            raise ApiError("API server not reached: TimeoutError")

    world.api.after_write = answer_is_lost
    with pytest.raises(ApiError):
        await world.operator.reconcile(KEY)
    world.api.after_write = lambda *_: None
    assert world.jobs() == ["tiny-main-0"]
    world.watch.publish()
    world.watch.lose()
    for suspend in (True, False):
        run = world.api.run()
        run["spec"] = {**run["spec"], "suspend": suspend}
        run["metadata"]["generation"] += 1
        world.api.put(RUN, run)
        world.store.put(RUN, world.api.run())
        for _ in range(3):
            await world.operator.reconcile(KEY)
    assert world.jobs() == [], "it was deleted, although no event had told of it"


async def test_a_pod_that_is_missing_in_the_store_alone_restarts_nothing() -> None:
    world = Counted()
    await world.trains()
    (pod, *_) = [p for p in world.api.all(POD) if "rainer" in str(p["metadata"]["labels"])]
    gone: Object = {"metadata": {**pod["metadata"], "resourceVersion": "9999"}}
    world.store.remove(POD, gone)
    await world.operator.reconcile(KEY)
    assert world.status["attempt"] == 0
    assert world.api.writes == []


async def test_before_everything_was_listed_all_is_read_from_the_api_server() -> None:
    world = Counted()
    await world.trains()
    world.store.lost(POD, None)
    await world.look()
    assert RUN.plural in world.reads
    assert POD.plural in world.reads


async def test_what_has_the_name_of_a_child_and_no_label_is_seen_and_left_alone() -> None:
    world = Counted()
    meta = {"name": "tiny-monitor", "namespace": "team"}
    world.api.put(SERVICE, {"metadata": meta, "spec": {}})
    for _ in range(3):
        await world.look()
    assert world.status["conditions"][0]["reason"] == "NameTaken"
    assert world.store.get(SERVICE, "team", "tiny-monitor") is None, "no watch would tell of it"
    world.api.remove(SERVICE, "tiny-monitor")
    await world.look()
    await world.look()
    assert world.status["conditions"][0]["reason"] != "NameTaken"


@pytest.mark.parametrize("kind", [RUN, POD], ids=["get", "list"])
async def test_an_answer_that_is_older_than_what_was_seen_is_asked_for_again(kind: Kind) -> None:
    world = Counted()
    await world.trains()
    old = copy.deepcopy(world.api.all(kind))
    if kind is RUN:
        world.api.run()["spec"]["suspend"] = True
        world.api.put(RUN, world.api.run())
    else:
        trainer = next(p for p in world.api.all(POD) if "rainer" in str(p["metadata"]["labels"]))
        trainer["status"]["phase"] = "Failed"
        world.api.put(POD, trainer)
    method = "get" if kind is RUN else "list"
    read = getattr(world.api, method)

    async def answer_is_old(asked: Kind, *arguments: Any) -> Any:
        if asked is not kind:
            return await read(asked, *arguments)
        return old if method == "list" else old[0]

    setattr(world.api, method, answer_is_old)
    with pytest.raises(ApiError, match="answers with an old state of"):
        await world.look()
    assert world.api.writes == []
    setattr(world.api, method, read)
    await world.look()
    assert world.api.writes != []
