"""Servers of several nodes: LeaderWorkerSets, where the operator may make them."""

import copy
from typing import Any

import pytest
from trainsync.api import names
from trainsync_operator.builders.servers import pod
from trainsync_operator.builders.servers.hosts import LABEL_GROUP, LABEL_RANK
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import (
    BUDGET,
    DEPLOYMENT,
    LEADER_WORKER_SET,
    OPTIONAL,
    POD,
    RUN,
    SERVICE,
    WATCHED,
    Kind,
)
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.trimmed import trim

from tests.unit.operator.fake_api import SILENT_NODE, events_of
from tests.unit.operator.reconcile.world import KEY, Ignore, World
from tests.unit.operator.support import seconds, with_servers

ROLLOUT = "tiny-server-rollout"
NODES = 2
FORBIDDEN = 'leaderworkersets is forbidden: User "system:serviceaccount:a:b" cannot patch resource'


def entry(image: str = "vllm:1", **changes: Any) -> Object:
    container = {"name": "vllm", "image": image, "command": ["vllm", "serve", "/model"]}
    template = {"spec": {"containers": [container]}}
    return {"name": "rollout", "nodes": NODES, "template": template, **changes}


class Large(World):
    """A world with one operator, a store and LWS's controller."""

    def __init__(
        self, *servers: Object, kinds: tuple[Kind, ...] = WATCHED + OPTIONAL, synced: bool = True
    ) -> None:
        super().__init__(with_servers(*servers))
        self.begin(kinds, synced)
        # Of each pod that was deleted, whether it goes after all that belongs to it.
        self.afterwards: list[bool] = []
        delete = self.api.delete

        async def noted(
            kind: Kind, namespace: str, name: str, uid: str, *, after_all: bool = False
        ) -> None:
            await delete(kind, namespace, name, uid, after_all=after_all)
            if kind is POD:
                self.afterwards.append(after_all)

        self.api.delete = noted  # type: ignore[method-assign]

    def begin(self, kinds: tuple[Kind, ...] = WATCHED + OPTIONAL, synced: bool = True) -> None:
        """An operator begins."""
        self._store = Store(trim, kinds=kinds)
        for kind in kinds if synced else ():
            self._store.seen(kind, None)
        monitor = MonitorSettings("monitor:1")
        self.operator = Reconciler(self.api, Ignore(), monitor, self.clock, store=self._store)

    async def look_without(self, kind: Kind) -> float | None:
        """A reconcile, after all news has come but that of the servers of a kind."""
        self._publish()
        self._store.remove(kind, self.api.objects[kind, "team", ROLLOUT])
        return await self.operator.reconcile(KEY)

    async def look(self) -> float | None:
        """A reconcile, after all news has come."""
        if self._store.synced:
            self._publish()
        return await self.operator.reconcile(KEY)

    def _publish(self) -> None:
        for kind in self._store.kinds:
            there = self.api.all(kind)
            for obj in there:
                # KubeRay's stand-in writes into what is there.
                objects.metadata(obj)["resourceVersion"] = self.api.next_version()
                self._store.put(kind, copy.deepcopy(obj))
            listed = {objects.metadata(obj)["uid"] for obj in there}
            self._store.replace(kind, None, listed, self.api.next_version())

    async def calm(self) -> float | None:
        """Look until nothing more is written, later than counts were written last."""
        self.clock.now += seconds(3)
        for _ in range(30):
            before = len(self.api.writes)
            again = await self.look()
            if len(self.api.writes) == before and (again is None or again >= 1):
                return again
        raise AssertionError(f"never calm: {self.api.writes[-10:]}")

    async def settle(self) -> None:
        """KubeRay and LWS do their part, and the operator sees it."""
        await self.calm()
        self.kuberay.settle()
        self.make_pods()
        await self.calm()

    def group(self) -> Object:
        return self.api.objects[LEADER_WORKER_SET, "team", ROLLOUT]

    def make_pods(self, began: str = "2026-01-01T00:00:10Z") -> None:
        """LWS makes what is missing, of the template that it has, and takes away what is over."""
        spec = self.group()["spec"]
        count, template = spec.get("replicas", 1), spec["leaderWorkerTemplate"]
        for number in range(count):
            for rank in range(NODES):
                name = f"{ROLLOUT}-{number}" + (f"-{rank}" if rank else "")
                if (POD, "team", name) not in self.api.objects:
                    self._make(name, number, rank, template, began)
        for obj in self.api.all(POD):
            if int(objects.labels(obj).get(LABEL_GROUP, "0")) >= count:
                self.api.remove(POD, objects.name(obj))

    def _make(self, name: str, number: int, rank: int, template: Object, began: str) -> None:
        made = template["workerTemplate" if rank else "leaderTemplate"]
        mine = {LABEL_GROUP: str(number), LABEL_RANK: str(rank)}
        statuses = [
            {"name": "vllm", "started": True, "state": {"running": {"startedAt": began}}},
        ]
        self.api.put(
            POD,
            {
                "metadata": {
                    "name": name,
                    "namespace": "team",
                    "labels": {**made["metadata"]["labels"], **mine},
                },
                "spec": copy.deepcopy(made["spec"]),
                "status": {
                    "phase": "Running",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": statuses,
                },
            },
        )

    def pod(self, name: str) -> Object:
        return self.api.objects[POD, "team", f"{ROLLOUT}-{name}"]

    def delete_pod(self, name: str) -> None:
        self.api.remove(POD, f"{ROLLOUT}-{name}")

    def restart(self, name: str, began: str | None, container: str = "vllm") -> None:
        """A container of a pod begins again; it does not run without a time."""
        found = self.pod(name)
        state = {"running": {"startedAt": began}} if began else {"waiting": {}}
        key = "containerStatuses" if container == "vllm" else "initContainerStatuses"
        of = [{"name": container, "started": began is not None, "state": state}]
        found["status"] = {**found["status"], key: of}
        self.api.put(POD, found)

    def deleted(self) -> list[str]:
        """Pods that the operator has deleted."""
        return [name for verb, kind, name in self.api.writes if (verb, kind) == ("delete", POD)]

    def edit(self, *servers: Object) -> None:
        run = self.api.run()
        run["spec"]["servers"] = with_servers(*servers)["servers"]
        run["metadata"]["generation"] += 1
        self.api.put(RUN, run)

    def condition(self) -> tuple[str, str, str]:
        found = objects.condition({"status": self.status}, "ServersReady")
        assert found is not None
        return found["status"], found["reason"], found["message"]

    @property
    def counts(self) -> tuple[int, int, int]:
        (found,) = self.status["servers"]
        return found["replicas"], found["readyReplicas"], found["updatedReplicas"]


async def test_servers_of_several_nodes_are_a_leader_worker_set_and_its_leaders_count() -> None:
    world = Large(entry(replicas=2))
    await world.calm()
    for kind in (LEADER_WORKER_SET, SERVICE, BUDGET):
        assert ROLLOUT in {objects.name(obj) for obj in world.api.all(kind)}
    assert ROLLOUT not in {objects.name(obj) for obj in world.api.all(DEPLOYMENT)}
    assert world.counts == (2, 0, 0)
    await world.settle()
    assert world.counts == (2, 2, 2)
    assert world.condition()[:2] == ("True", "AllReady")
    assert events_of(world.api).count("ServersCreated") == 1
    world.pod("1")["status"]["conditions"] = []
    world.api.put(POD, world.pod("1"))
    await world.calm()
    assert world.counts == (2, 1, 2)
    assert world.condition()[:2] == ("False", "NotAllReady")


async def test_without_its_option_the_operator_asks_for_none_and_says_what_is_missing() -> None:
    world = Large(entry(), {"name": "judge"}, kinds=WATCHED)
    asked: list[Kind] = []
    get, listed = world.api.get, world.api.list

    async def counted_get(kind: Kind, *arguments: Any) -> Any:
        asked.append(kind)
        return await get(kind, *arguments)

    async def counted_list(kind: Kind, *arguments: Any) -> Any:
        asked.append(kind)
        return await listed(kind, *arguments)

    world.api.get, world.api.list = counted_get, counted_list  # type: ignore[method-assign]
    await world.calm()
    assert LEADER_WORKER_SET not in asked
    status, reason, message = world.condition()
    assert (status, reason) == ("False", "LeaderWorkerSetMissing")
    assert "install LWS" in message
    assert "leaderWorkerSets.enabled" in message
    names_of = {objects.name(obj) for obj in world.api.all(DEPLOYMENT)}
    assert {"tiny-server-judge", "tiny-monitor"} <= names_of, "the rest goes on"
    assert world.clusters() == ["tiny-main-0"]


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize(
    ("status", "said", "remedy"),
    [
        (404, "the server could not find the requested resource", "install LWS"),
        (403, FORBIDDEN, "set leaderWorkerSets.enabled of the operator's chart"),
    ],
)
async def test_where_there_are_none_or_no_right_to_them_the_rest_of_the_run_goes_on(
    synced: bool, status: int, said: str, remedy: str
) -> None:
    world = Large(entry(), synced=synced)
    away = [True]
    apply, get, listed = world.api.apply, world.api.get, world.api.list

    def refuse(kind: Kind) -> None:
        if away and kind is LEADER_WORKER_SET:
            raise ApiRefusedError(status, said)

    async def refused_apply(kind: Kind, obj: Object) -> Object:
        refuse(kind)
        return await apply(kind, obj)

    async def refused_get(kind: Kind, *arguments: Any) -> Any:
        if status != 404:  # the client answers None
            refuse(kind)
        return await get(kind, *arguments)

    async def refused_list(kind: Kind, *arguments: Any) -> Any:
        refuse(kind)
        return await listed(kind, *arguments)

    world.api.apply = refused_apply  # type: ignore[method-assign]
    world.api.get, world.api.list = refused_get, refused_list  # type: ignore[method-assign]
    again = await world.calm()
    assert world.condition()[1] == "LeaderWorkerSetMissing"
    assert remedy in world.condition()[2]
    assert again is not None
    assert again <= 15, "it is asked for again"
    for _ in range(2):
        world.kuberay.settle()
        await world.calm()
    assert world.jobs() == ["tiny-main-0"]
    away.clear()
    world.clock.now += seconds(20)
    await world.calm()
    assert objects.name(world.group()) == ROLLOUT


async def test_while_the_webhook_of_lws_does_not_answer_the_rest_of_the_run_goes_on() -> None:
    world = Large(entry())
    apply = world.api.apply

    async def failing(kind: Kind, obj: Object) -> Object:
        if kind is LEADER_WORKER_SET:
            raise ApiError('API server answered 500: failed calling webhook "mlws": refused', 500)
        return await apply(kind, obj)

    world.api.apply = failing  # type: ignore[method-assign]
    await world.calm()
    assert world.condition()[1] == "Refused"
    assert "failed calling webhook" in world.condition()[2]
    assert world.clusters() == ["tiny-main-0"]


async def test_an_api_server_that_is_away_is_no_problem_of_the_servers() -> None:
    world = Large(entry())

    async def away(kind: Kind, obj: Object) -> Object:
        raise ApiError(f"API server not reached: {kind.name} {objects.name(obj)}")

    await world.look()
    world.api.apply = away  # type: ignore[method-assign]
    del world.api.objects[LEADER_WORKER_SET, "team", ROLLOUT]
    with pytest.raises(ApiError, match="not reached"):
        await world.look()


@pytest.mark.parametrize("lost", ["1", None])
async def test_a_server_of_which_a_process_began_again_begins_anew(lost: str | None) -> None:
    world = Large(entry(replicas=2))
    await world.settle()
    name = f"0-{lost}" if lost else "0"
    world.restart(name, "2026-01-01T00:05:00Z")
    await world.calm()
    assert world.deleted() == [f"{ROLLOUT}-0"], "the other server goes on"
    assert events_of(world.api).count("ServerReplaced") == 1
    world.delete_pod("0-1")  # with its leader
    world.make_pods("2026-01-01T00:06:00Z")
    await world.calm()
    assert world.deleted() == [f"{ROLLOUT}-0"], "the new ones began together"
    assert world.counts == (2, 2, 2)


async def test_a_server_that_lost_a_pod_begins_anew_before_another_is_in_its_place() -> None:
    world = Large(entry())
    await world.settle()
    world.delete_pod("0-1")
    await world.calm()
    assert world.deleted() == [f"{ROLLOUT}-0"]


async def test_a_pod_on_a_lost_node_goes_at_once_and_with_it_its_server() -> None:
    world = Large(entry())
    await world.settle()
    lost = world.pod("0-1")
    lost["metadata"]["deletionTimestamp"] = "2026-01-01T00:05:00Z"
    lost["status"]["conditions"] = SILENT_NODE
    world.api.put(POD, lost)
    await world.calm()
    assert world.deleted() == [f"{ROLLOUT}-0-1", f"{ROLLOUT}-0"]
    assert world.afterwards == [False, True], "no kubelet ends the first one"
    assert {"LostPodDeleted", "ServerReplaced"} <= set(events_of(world.api))


async def test_an_agent_that_began_again_costs_no_server() -> None:
    world = Large(entry())
    await world.settle()
    for name in ("0", "0-1"):
        world.restart(name, "2026-01-01T00:05:00Z", pod.AGENT)
    await world.calm()
    assert world.deleted() == []


async def test_a_status_that_says_nothing_of_a_process_costs_no_server() -> None:
    world = Large(entry())
    await world.settle()
    found = world.pod("0-1")
    told = found["status"].pop("containerStatuses")
    world.api.put(POD, found)
    await world.calm()
    assert world.deleted() == []
    found["status"]["containerStatuses"] = told
    world.api.put(POD, found)
    await world.calm()
    assert world.deleted() == []
    found["status"] = {"phase": "Failed", "reason": "Evicted"}
    world.api.put(POD, found)
    await world.calm()
    assert world.deleted() == [f"{ROLLOUT}-0"]


async def test_a_process_may_begin_again_until_all_have_joined() -> None:
    world = Large(entry())
    await world.calm()
    world.make_pods()
    world.pod("0")["status"]["containerStatuses"][0]["started"] = False
    world.restart("0-1", None)
    await world.calm()
    world.restart("0-1", "2026-01-01T00:05:00Z")
    await world.calm()
    world.restart("0", "2026-01-01T00:05:30Z")
    await world.calm()
    assert world.deleted() == []
    world.restart("0-1", "2026-01-01T00:06:00Z")
    await world.calm()
    assert world.deleted() == [f"{ROLLOUT}-0"]


async def test_servers_that_are_scaled_down_are_no_lost_ones() -> None:
    world = Large(entry(replicas=2))
    await world.settle()
    world.edit(entry(replicas=1))
    await world.calm()
    assert world.group()["spec"]["replicas"] == 1
    world.pod("1")["metadata"]["deletionTimestamp"] = "2026-01-01T00:05:00Z"
    world.api.put(POD, world.pod("1"))
    world.delete_pod("1-1")
    await world.calm()
    world.make_pods()
    await world.calm()
    assert world.deleted() == []
    assert world.counts == (1, 1, 1)


async def test_who_may_not_delete_the_pod_is_told_of() -> None:
    world = Large(entry())
    await world.settle()

    def refuse(verb: str, kind: Kind, _: str) -> None:
        if (verb, kind) == ("delete", POD):
            raise ApiRefusedError(403, "no pods today")

    world.api.before_write = refuse
    world.restart("0-1", "2026-01-01T00:05:00Z")
    await world.calm()
    assert world.condition()[1] == "Refused"
    assert "no pods today" in world.condition()[2]
    world.kuberay.settle()
    await world.calm()
    assert world.jobs() == ["tiny-main-0"]


async def test_while_servers_are_replaced_as_many_as_asked_for_are_ready() -> None:
    world = Large(entry(replicas=2))
    await world.settle()
    world.edit(entry("vllm:2", replicas=2))
    await world.calm()
    assert world.group()["spec"]["replicas"] == 3
    assert world.counts == (2, 2, 0)
    world.make_pods()
    await world.calm()
    assert world.counts == (2, 3, 1)
    assert world.condition()[:2] == ("False", "NotAllReady")
    for number in ("1", "0"):
        world.delete_pod(f"{number}-1")
        world.delete_pod(number)
        await world.calm()
        assert world.group()["spec"]["replicas"] == 3
        assert world.counts[1] == 2
        world.make_pods("2026-01-01T00:07:00Z")
        await world.calm()
    assert world.group()["spec"]["replicas"] == 2
    world.make_pods()
    await world.calm()
    assert world.counts == (2, 2, 2)
    assert world.condition()[:2] == ("True", "AllReady")
    assert names.ANNOTATION_SURGE_OF not in world.group()["metadata"]["annotations"]
    assert world.deleted() == [], "no server lost a node"


async def test_who_scales_the_set_decides_and_a_suspension_keeps_the_number() -> None:
    world = Large(entry())
    await world.settle()
    world.group()["spec"]["replicas"] = 3
    world.api.put(LEADER_WORKER_SET, world.group())
    await world.calm()
    assert world.group()["spec"]["replicas"] == 3
    run = world.api.run()
    run["spec"] |= {"suspend": True, "suspendPolicy": {"saveDeadlineSeconds": 0}}
    world.api.put(RUN, run)
    await world.calm()
    assert world.group()["spec"]["replicas"] == 0
    run = world.api.run()
    run["spec"]["suspend"] = False
    world.api.put(RUN, run)
    await world.calm()
    assert world.group()["spec"]["replicas"] == 3
    assert world.status["attempt"] <= 1


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_number_of_servers_outlives_a_store_that_does_not_know_them(nodes: int) -> None:
    kind = DEPLOYMENT if nodes == 1 else LEADER_WORKER_SET
    world = Large(entry(nodes=nodes))
    await world.calm()
    found = world.api.objects[kind, "team", ROLLOUT]
    found["spec"]["replicas"] = 3
    world.api.put(kind, found)
    await world.calm()
    run = world.api.run()
    run["spec"] |= {"suspend": True, "suspendPolicy": {"saveDeadlineSeconds": 0}}
    world.api.put(RUN, run)
    await world.calm()
    world.begin()
    # As where the operator was not allowed to list them, and is a moment later.
    await world.look_without(kind)
    found = world.api.objects[kind, "team", ROLLOUT]
    assert found["metadata"]["annotations"][names.ANNOTATION_REPLICAS] == "3"


@pytest.mark.parametrize("nodes", [(1, 2), (2, 1)])
async def test_of_an_entry_that_came_back_with_another_number_of_nodes_one_kind_is_there(
    nodes: tuple[int, int],
) -> None:
    kinds = {1: DEPLOYMENT, 2: LEADER_WORKER_SET}
    world = Large(entry(nodes=nodes[0]))
    await world.calm()
    assert (kinds[nodes[0]], "team", ROLLOUT) in world.api.objects
    world.edit(entry(nodes=nodes[1]))
    await world.calm()
    assert (kinds[nodes[1]], "team", ROLLOUT) in world.api.objects
    assert (kinds[nodes[0]], "team", ROLLOUT) not in world.api.objects


async def test_an_entry_that_is_removed_takes_its_set() -> None:
    world = Large(entry())
    await world.settle()
    world.edit()
    await world.calm()
    for kind in (LEADER_WORKER_SET, SERVICE, BUDGET):
        assert ROLLOUT not in {objects.name(obj) for obj in world.api.all(kind)}
