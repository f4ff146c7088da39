"""Workers go on whatever a reconcile does, and runs are looked at even without events."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kubernetes.aio.client.exceptions import ApiException
from prometheus_client import CollectorRegistry
from trainsync_operator.controller.queue import WorkQueue
from trainsync_operator.controller.worker import LONGEST_PAUSE_SECONDS, resync, work
from trainsync_operator.kube.client import ApiError, ApiRefusedError, _error
from trainsync_operator.kube.kinds import RUN
from trainsync_operator.kube.store import Store
from trainsync_operator.metrics.metrics import Metrics
from trainsync_operator.reconcile.run import Key
from trainsync_operator.reconcile.status_writer import StaleError

from monitoring.rules import STANDSTILL
from tests.unit.operator.support import raw_run

GOOD, BAD = Key("team", "good"), Key("team", "bad")


class Reconciler:
    """Fails for one key in a chosen way; the other one goes well."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.calls: list[Key] = []
        self.good = asyncio.Event()
        self.bad_again = asyncio.Event()
        self.told: list[str] = []

    async def unable(self, key: Key, message: str) -> None:
        assert key == BAD
        self.told.append(message)
        raise ApiError("the status is not reached either")

    async def reconcile(self, key: Key) -> float | None:
        self.calls.append(key)
        if key == BAD:
            if self.calls.count(BAD) == 2:
                self.bad_again.set()
            raise self.failure
        self.good.set()
        return None


def throttled(seconds: float) -> ApiError:
    failure = ApiError("API server answered 429: slow down")
    failure.retry_after = seconds
    return failure


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


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ApiError("API server answered 500: webhook"), ["API server answered 500: webhook"] * 2),
        (TimeoutError(), ["one look took longer than 120 s"] * 2),
        (StaleError("the run has changed"), []),
        (throttled(0.001), []),
    ],
)
async def test_a_failure_that_lasts_is_told_of_in_the_status(
    failure: Exception, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainsync_operator.controller.queue.FIRST_RETRY_SECONDS", 0.001)
    queue: WorkQueue[Key] = WorkQueue()
    reconciler = Reconciler(failure)
    with working(queue, reconciler, Metrics(CollectorRegistry())):
        queue.add(BAD)
        async with asyncio.timeout(10):
            while reconciler.calls.count(BAD) < 5:  # noqa: ASYNC110 -- counts, not an event
                await asyncio.sleep(0.001)
    assert reconciler.told[:2] == told


async def test_the_api_servers_own_wait_is_kept() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    reconciler = Reconciler(throttled(60.0))
    with working(queue, reconciler, Metrics(CollectorRegistry())):
        queue.add(BAD)
        await asyncio.sleep(1.0)
        assert len(reconciler.calls) == 1


async def test_an_error_may_say_how_long_the_next_look_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainsync_operator.controller.queue.FIRST_RETRY_SECONDS", 600.0)
    failure = ApiRefusedError(403, "exceeded quota")
    failure.at_most = 0.01
    reconciler = Reconciler(failure)
    queue: WorkQueue[Key] = WorkQueue()
    with working(queue, reconciler, Metrics(CollectorRegistry())):
        queue.add(BAD)
        async with asyncio.timeout(10):
            await reconciler.bad_again.wait()


async def test_every_run_is_asked_for_from_time_to_time_one_after_another() -> None:
    store = Store()
    for number in range(3):
        store.put(RUN, raw_run(name=f"run-{number}", uid=f"uid-{number}"))
    queue: WorkQueue[Key] = WorkQueue()
    task = asyncio.create_task(resync(queue, store, seconds=0.3))
    async with asyncio.timeout(10):
        times: list[float] = []
        for turn in range(6):
            key = await queue.take()
            times.append(asyncio.get_running_loop().time())
            assert key == Key("team", f"run-{turn % 3}")
            queue.done(key)
    task.cancel()
    assert times[2] - times[0] > 0.15, "spread over the time, not all at once"


async def test_of_few_runs_one_is_asked_for_before_an_alert_takes_it_for_a_standstill() -> None:
    store = Store()
    queue: WorkQueue[Key] = WorkQueue()
    task = asyncio.create_task(resync(queue, store, seconds=1e6, longest_pause=0.01))
    await asyncio.sleep(0)  # it has found no run
    store.put(RUN, raw_run(name="alone", uid="uid"))
    async with asyncio.timeout(10):
        for _ in range(3):
            key = await queue.take()
            assert key == Key("team", "alone")
            queue.done(key)
    task.cancel()
    assert 2 * LONGEST_PAUSE_SECONDS < STANDSTILL


async def test_a_run_that_is_always_asked_for_does_not_starve_the_others() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    reconciled: list[Key] = []

    class Hot(Reconciler):
        async def reconcile(self, key: Key) -> float | None:
            reconciled.append(key)
            queue.add(BAD)  # its own status, a monitor, a pod: there is always something new
            await asyncio.sleep(0)
            return 0.0 if key == BAD else None

    queue.add(BAD)
    others = [Key("team", f"run-{number}") for number in range(100)]
    with working(queue, Hot(KeyError()), Metrics(CollectorRegistry())):
        for key in others:
            queue.add(key)
        async with asyncio.timeout(10):
            while len(set(reconciled)) < 101:  # noqa: ASYNC110 -- counts, not an event
                await asyncio.sleep(0.001)
    last = max(reconciled.index(key) for key in others)
    assert reconciled[: last + 1].count(BAD) <= 102, "at most one turn for each of the others'"


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


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7), ("100000", 300), ("-1", 0), ("soon", 0), (None, 0)]
)
def test_the_wait_that_an_answer_asks_for(header: str | None, seconds: float) -> None:
    answer = ApiException(status=429, reason="no")
    answer.headers = {"Retry-After": header} if header else None
    assert _error(answer).retry_after == seconds


def test_an_answer_that_is_no_json_still_has_a_reason() -> None:
    answer = ApiException(status=502, reason="Bad Gateway")
    answer.body = "<html>"
    assert "Bad Gateway" in str(_error(answer))
