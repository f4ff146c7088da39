"""The operator's process: how it starts and how it ends."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from trainsync_operator import app
from trainsync_operator.builders.target import MonitorImage
from trainsync_operator.kube.client import ApiError
from trainsync_operator.kube.kinds import CHILDREN, RUN, SERVICE, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.metrics.metrics import Metrics

from tests.unit.operator.support import FakeApi, raw_run


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


async def test_no_worker_goes_on_while_the_watches_close(monkeypatch: pytest.MonkeyPatch) -> None:
    api = LargeCluster()
    api.put(RUN, raw_run())
    reads: list[bool] = []
    closing = asyncio.Event()

    async def reconciled(_: Any, key: Any) -> float:
        reads.append(closing.is_set())
        return 0.001

    async def slow_to_close(**arguments: Any) -> None:
        await arguments["registry"]("team", "tiny")
        try:
            await asyncio.Event().wait()
        finally:
            closing.set()
            await asyncio.sleep(0.1)

    def registry(add: Any) -> Any:
        async def seen(namespace: str, name: str) -> None:
            add(app.Key(namespace, name))

        return seen

    monkeypatch.setattr(app.Reconciler, "reconcile", reconciled)
    monkeypatch.setattr(app.kopf, "operator", slow_to_close)
    monkeypatch.setattr(app.watch, "registry", registry)
    options = app.Options(MonitorImage("monitor:1"))
    leading = asyncio.create_task(
        app.lead(options, api, Metrics(CollectorRegistry()), asyncio.Event())
    )
    await asyncio.sleep(0.1)
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading
    assert len(reads) > 3
    assert not any(reads)
