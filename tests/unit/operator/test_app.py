"""The operator's process: how it starts and how it ends."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from trainsync_operator import app
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube.client import ApiError, Event, Page
from trainsync_operator.kube.kinds import CHILDREN, LEADER_WORKER_SET, RUN, SERVICE, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.metrics.metrics import Metrics

from tests.unit.operator.fake_api import FakeApi
from tests.unit.operator.support import raw_run


class LargeCluster(FakeApi):
    """Lists of more than one object take longer than a request may."""

    def __init__(self) -> None:
        super().__init__(lambda: datetime(2026, 1, 1, tzinfo=UTC))
        self.asked: list[Kind] = []
        self.refusals = 0

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", limit: int | None = None
    ) -> list[Object]:
        self.asked.append(kind)
        if limit is None or (kind is SERVICE and self.asked.count(kind) <= self.refusals):
            raise ApiError("API server not reached: TimeoutError")
        return await super().list(kind, namespace, selector, limit)


async def test_the_start_reads_one_object_of_each_kind_and_not_all_of_them() -> None:
    api = LargeCluster()
    await app.wait_for_kinds(api, None)
    assert api.asked == [RUN, *CHILDREN]


async def test_the_start_waits_for_a_kind_that_is_not_served_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "_KIND_SECONDS", 0.001)
    api = LargeCluster()
    api.refusals = 2
    await app.wait_for_kinds(api, None)
    assert api.asked.count(SERVICE) == 3


class Source:
    """Every kind is listed with nothing in it but runs, when it is ``listed``."""

    def __init__(self) -> None:
        self.listed = asyncio.Event()
        self.asked: set[Kind] = set()

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = ""
    ) -> AsyncIterator[Page]:
        self.asked.add(kind)
        if kind is RUN:
            await self.listed.wait()
        yield Page([raw_run()] if kind is RUN else [], "1")

    async def watch(self, *_: Any) -> AsyncIterator[Event]:
        await asyncio.Event().wait()
        yield Event("BOOKMARK", {})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[app.Key]:
    """Keys that workers reconcile."""
    found: list[app.Key] = []

    async def reconciled(_: Any, key: app.Key) -> None:
        found.append(key)

    monkeypatch.setattr(app.Reconciler, "reconcile", reconciled)
    return found


async def lead(source: Source, reads: list[app.Key], *, large: bool = False) -> None:
    options = app.Options(MonitorSettings("monitor:1"), leader_worker_sets=large)
    metrics = Metrics(CollectorRegistry())
    leading = asyncio.create_task(
        app.lead(options, LargeCluster(), source, metrics, asyncio.Event())
    )
    async with asyncio.timeout(10):
        while not reads:
            assert not leading.done()
            await asyncio.sleep(0.01)
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading


async def test_no_run_is_reconciled_before_everything_was_listed(reads: list[app.Key]) -> None:
    source = Source()
    begun = asyncio.get_running_loop().time()
    asyncio.get_running_loop().call_later(0.3, source.listed.set)
    await lead(source, reads)
    assert asyncio.get_running_loop().time() - begun > 0.29
    assert reads == [app.Key("team", "tiny")]


@pytest.mark.parametrize("large", [False, True])
async def test_leader_worker_sets_are_watched_where_the_operator_is_to_make_them(
    large: bool, reads: list[app.Key]
) -> None:
    source = Source()
    source.listed.set()
    await lead(source, reads, large=large)
    assert (LEADER_WORKER_SET in source.asked) is large


async def test_a_list_that_hangs_does_not_stop_the_operator_for_ever(
    monkeypatch: pytest.MonkeyPatch, reads: list[app.Key]
) -> None:
    monkeypatch.setattr(app, "_SYNC_SECONDS", 0.1)
    monkeypatch.setattr(app, "resync", resync_at_once)
    await lead(Source(), reads)


async def resync_at_once(queue: Any, _: Any) -> None:
    queue.add(app.Key("team", "tiny"))
