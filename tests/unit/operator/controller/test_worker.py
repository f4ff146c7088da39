"""Workers go on whatever a reconcile does, and runs are looked at even without events."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from kubernetes.aio.client.exceptions import ApiException
from prometheus_client import CollectorRegistry
from trainsync_operator.controller.queue import WorkQueue
from trainsync_operator.controller.worker import resync, work
from trainsync_operator.kube.client import ApiError, ApiRefusedError, _error
from trainsync_operator.kube.kinds import RUN
from trainsync_operator.metrics.metrics import Metrics
from trainsync_operator.reconcile.reconcile import Key

from tests.unit.operator.support import FakeApi, raw_run

GOOD, BAD = Key("team", "good"), Key("team", "bad")


class Reconciler:
    """Fails for one key in a chosen way; the other one goes well."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.calls: list[Key] = []
        self.good = asyncio.Event()
        self.bad_again = asyncio.Event()

    async def reconcile(self, key: Key) -> float | None:
        self.calls.append(key)
        if key == BAD:
            if self.calls.count(BAD) == 2:
                self.bad_again.set()
            raise self.failure
        self.good.set()
        return None


@contextmanager
def working(queue: WorkQueue[Key], reconciler: Reconciler, metrics: Metrics) -> Iterator[None]:
    task = asyncio.create_task(work(queue, reconciler, metrics))  # type: ignore[arg-type]
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("failure", "result"),
    [(ApiError("not reached"), "error"), (TimeoutError(), "error"), (KeyError("bug"), "fault")],
)
async def test_a_run_that_fails_does_not_stop_the_others_and_is_tried_again(
    failure: Exception, result: str
) -> None:
    queue: WorkQueue[Key] = WorkQueue()
    metrics = Metrics(CollectorRegistry())
    reconciler = Reconciler(failure)
    with working(queue, reconciler, metrics):
        queue.add(BAD)
        queue.add(GOOD)
        async with asyncio.timeout(10):
            await reconciler.good.wait()
            await reconciler.bad_again.wait()
    assert metrics.registry.get_sample_value(
        "trainsync_operator_reconciles_total", {"result": result}
    )
    assert metrics.registry.get_sample_value("trainsync_operator_queue_retries_total")


async def test_every_run_is_asked_for_from_time_to_time() -> None:
    api = FakeApi(lambda: datetime(2026, 1, 1, tzinfo=UTC))
    api.put(RUN, raw_run())
    queue: WorkQueue[Key] = WorkQueue()
    task = asyncio.create_task(resync(queue, api, ["team"], seconds=0.01))
    async with asyncio.timeout(10):
        for _ in range(2):
            key = await queue.take()
            assert key == Key("team", "tiny")
            queue.done(key)
    task.cancel()


@pytest.mark.parametrize(
    ("status", "message", "refused"),
    [
        (403, "exceeded quota", True),
        (422, "invalid", True),
        (409, "conflict", True),
        (429, "slow down", False),
        (408, "timeout", False),
        (500, "etcd is down", False),
        (503, "unavailable", False),
        (500, "failed to create typed patch object (a; b): .x: field not declared", True),
    ],
)
def test_what_the_api_server_would_say_again_is_a_refusal(
    status: int, message: str, refused: bool
) -> None:
    answer = ApiException(status=status, reason="no")
    answer.body = json.dumps({"message": message})
    error = _error(answer)
    assert isinstance(error, ApiRefusedError) is refused
    assert message in str(error)


def test_an_answer_that_is_no_json_still_has_a_reason() -> None:
    answer = ApiException(status=502, reason="Bad Gateway")
    answer.body = "<html>"
    assert "Bad Gateway" in str(_error(answer))
