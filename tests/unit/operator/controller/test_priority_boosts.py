"""Boosts of Workloads follow what is at risk, with few writes, and outlive failures."""

import logging
from typing import Any

import pytest
from trainsync.api import names
from trainsync_operator.controller import priority_boosts
from trainsync_operator.controller.priority_boosts import (
    BOOST_ANNOTATION,
    JOB_UID_LABEL,
    PriorityBoosts,
)
from trainsync_operator.kube.client import ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import RAY_CLUSTER, RUN, WORKLOAD, Kind
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile.decide.preemption_cost import BoostScale
from trainsync_operator.reconcile.run import QUEUE_LABEL

from tests.unit.operator.fake_api import FakeApi
from tests.unit.operator.support import START, raw_run


class Cluster:
    """A run with a RayCluster in a queue, its Workload, and the boosts."""

    def __init__(self, queue: bool = True) -> None:
        self.api = FakeApi(lambda: START)
        self.store = Store()
        self.version = 1
        labels = {names.LABEL_RUN: "tiny"} | ({QUEUE_LABEL: "q"} if queue else {})
        metadata = {"name": "tiny-main-0", "namespace": "team", "uid": "ray", "labels": labels}
        ray = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": {}}
        self.store.put(RAY_CLUSTER, ray)
        self.boosts = PriorityBoosts(self.api, self.store, BoostScale(highest=9, unit=1))

    def at_risk(self, seconds: int, phase: str = "Running") -> None:
        self.version += 1
        run = raw_run(
            status={"phase": phase, "atRisk": {"seconds": seconds, "gpuSeconds": seconds}}
        )
        run["metadata"]["resourceVersion"] = str(self.version)
        self.store.put(RUN, run)

    def another_ray(self) -> None:
        ray = self.store.get(RAY_CLUSTER, "team", "tiny-main-0")
        assert ray is not None
        ray["metadata"] |= {"name": "tiny-other-0", "uid": "another"}
        self.store.put(RAY_CLUSTER, ray)

    def workload(self, uid: str = "w", ray: str = "ray") -> None:
        metadata: dict[str, Any] = {"name": "w", "namespace": "team", "uid": uid}
        metadata["labels"] = {JOB_UID_LABEL: ray}
        self.api.put(WORKLOAD, {"metadata": metadata})

    @property
    def boost(self) -> str | None:
        annotations = self.api.objects[WORKLOAD, "team", "w"]["metadata"].get("annotations") or {}
        value: str | None = annotations.get(BOOST_ANNOTATION)
        return value


async def test_a_boost_comes_and_goes_with_what_is_at_risk() -> None:
    cluster = Cluster()
    cluster.workload()
    for seconds, phase, boost in (
        (7, "Running", "3"),
        (0, "Running", None),
        (1, "Running", "1"),
        (1, "Suspending", None),
    ):
        cluster.at_risk(seconds, phase)
        await cluster.boosts.look()
        assert cluster.boost == boost


async def test_what_has_not_changed_is_not_written_again() -> None:
    cluster = Cluster()
    cluster.workload()
    for seconds in (3, 4, 5, 6):  # all of them 2
        cluster.at_risk(seconds)
        await cluster.boosts.look()
    assert cluster.boost == "2"
    assert cluster.api.writes == [("apply", WORKLOAD, "w")]


async def test_a_workload_that_is_made_later_or_anew_is_boosted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    cluster.at_risk(3)
    await cluster.boosts.look()
    cluster.workload()
    await cluster.boosts.look()
    assert cluster.boost == "2"
    cluster.workload("another")
    monkeypatch.setattr(priority_boosts, "AGAIN_SECONDS", 0.0)
    await cluster.boosts.look()
    assert cluster.boost == "2"


async def test_a_run_that_no_queue_manages_and_workloads_of_others_are_left_alone() -> None:
    cluster = Cluster(queue=False)
    cluster.workload()
    cluster.at_risk(100)
    await cluster.boosts.look()
    assert cluster.boost is None
    cluster = Cluster()
    cluster.workload(ray="of another job")
    cluster.at_risk(100)
    await cluster.boosts.look()
    assert cluster.boost is None


async def test_a_failure_is_told_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.workload()
    cluster.at_risk(3)

    def away(verb: str, kind: Kind, name: str) -> None:
        raise ApiError("the API server is away")

    cluster.api.before_write = away
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await cluster.boosts.look()
    assert [record.message for record in caplog.records] == [
        "the priority of team/tiny-main-0 is not boosted: the API server is away"
    ]
    cluster.api.before_write = lambda *_: None
    await cluster.boosts.look()
    assert cluster.boost == "2"


async def test_an_odd_answer_ends_neither_the_look_nor_the_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster()
    cluster.another_ray()
    cluster.workload()
    cluster.at_risk(3)
    listed = cluster.api.list

    async def odd(kind: Kind, namespace: str | None, selector: str = "") -> Any:
        if selector.endswith("=ray"):
            raise RuntimeError("Connection closed.")  # as aiohttp says
        return await listed(kind, namespace, selector)

    cluster.api.list = odd  # type: ignore[method-assign, assignment]
    cluster.workload(ray="another")
    await cluster.boosts.look()
    assert cluster.boost == "2", "the other run's"
    assert "team/tiny-main-0 is not boosted" in caplog.text


@pytest.mark.parametrize("status", [403, 404])
async def test_where_no_workload_can_be_listed_a_look_asks_once_for_a_namespace(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    cluster.another_ray()
    asked: list[str] = []

    async def refused(kind: Kind, namespace: str | None, selector: str = "") -> Any:
        asked.append(selector)
        raise ApiRefusedError(status, "the server could not find the requested resource")

    cluster.api.list = refused  # type: ignore[method-assign, assignment]
    for _ in range(3):
        await cluster.boosts.look()
    assert len(asked) == 3
    assert len(caplog.records) == 1


async def test_a_workload_without_a_boost_is_not_looked_for_again() -> None:
    cluster = Cluster()
    asked: list[str] = []

    async def none(kind: Kind, namespace: str | None, selector: str = "") -> Any:
        asked.append(selector)
        return []

    cluster.api.list = none  # type: ignore[method-assign, assignment]
    for _ in range(3):
        await cluster.boosts.look()
    assert len(asked) == 1
