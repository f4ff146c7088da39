"""The operator's process: how it starts and how it ends."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from trainsync_operator import app
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.controller import watch_thread
from trainsync_operator.kube.client import ApiError
from trainsync_operator.kube.kinds import CHILDREN, RUN, SERVICE, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.metrics.metrics import Metrics

from tests.unit.operator.support import FakeApi


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


def registry(add: Any) -> Any:
    """In the place of kopf's: calls ``add`` as its handlers do."""
    return lambda name: add(app.Key("team", name))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[app.Key]:
    """Keys that workers reconcile, each again after 1 ms."""
    found: list[app.Key] = []

    async def reconciled(_: Any, key: app.Key) -> float:
        found.append(key)
        return 0.001

    monkeypatch.setattr(app.Reconciler, "reconcile", reconciled)
    monkeypatch.setattr(watch_thread.watch, "registry", registry)
    return found


def start() -> asyncio.Task[None]:
    options = app.Options(MonitorSettings("monitor:1"))
    metrics = Metrics(CollectorRegistry())
    return asyncio.create_task(app.lead(options, LargeCluster(), metrics, asyncio.Event()))


async def end(leading: asyncio.Task[None]) -> None:
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading


async def test_no_worker_goes_on_while_the_watches_close(
    monkeypatch: pytest.MonkeyPatch, reads: list[app.Key]
) -> None:
    at_closing: list[int] = []

    async def slow_to_close(**arguments: Any) -> None:
        arguments["registry"]("tiny")
        await arguments["stop_flag"].wait()
        at_closing.append(len(reads))
        await asyncio.sleep(0.1)

    monkeypatch.setattr(watch_thread.kopf, "operator", slow_to_close)
    leading = start()
    await asyncio.sleep(0.1)
    await end(leading)
    assert at_closing[0] > 3
    assert len(reads) <= at_closing[0] + 1


async def test_a_watch_that_fails_starts_again_and_workers_go_on(
    monkeypatch: pytest.MonkeyPatch, reads: list[app.Key]
) -> None:
    monkeypatch.setattr(watch_thread, "FIRST_RESTART_SECONDS", 0.01)
    starts: list[float] = []

    async def fails_twice(**arguments: Any) -> None:
        starts.append(asyncio.get_running_loop().time())
        arguments["registry"](f"run-{len(starts)}")
        if len(starts) < 3:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not others, "kopf cancels all tasks of its loop when it ends"
            raise RuntimeError("Error in the watch-stream: {'code': 500}")
        await arguments["stop_flag"].wait()

    monkeypatch.setattr(watch_thread.kopf, "operator", fails_twice)
    leading = start()
    async with asyncio.timeout(5):
        # The reads come from another thread.
        while {key.name for key in reads} != {"run-1", "run-2", "run-3"}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert starts[2] - starts[1] >= 0.02, "with back-off"
    await end(leading)
