"""How Events reach the API server: each once, not too many, again when it was away."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from trainsync.kube.client import KubeError
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.server.event_poster import BURST, SECONDS_FOR_EACH, Allowance, EventPoster
from trainsync.monitor.server.events import EventQueue

from tests.unit.monitor.fakes import NAMESPACE, UID, FakeApi
from tests.unit.monitor.saves import CHECKPOINT, Clock


class Posting:
    """A poster whose time is passed by its own waiting."""

    def __init__(self, api: FakeApi, before_wait: Callable[[float], None] = lambda _: None) -> None:
        self.api = api
        self.seconds = 0.0
        self.before_wait = before_wait
        self.counts: list[str] = []
        self.signal = ChangeSignal()
        self.queue = EventQueue(Clock(), wake=self.signal.notify_threadsafe)
        self.poster = EventPoster(
            api,
            self.queue,
            namespace=NAMESPACE,
            run="run",
            uid=UID,
            count=self.counts.append,
            monotonic=lambda: self.seconds,
            sleep=self.sleep,
        )

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.before_wait(seconds)
        self.seconds += seconds
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Run the poster that long."""
        task = asyncio.create_task(self.poster.run(self.signal))
        try:
            async with asyncio.timeout(20):
                while not condition():
                    assert not task.done(), task.exception()
                    await asyncio.sleep(0)
        finally:
            task.cancel()


async def test_an_event_regards_the_run_and_is_posted_once(api: FakeApi) -> None:
    posting = Posting(api)
    posting.queue.damaged(CHECKPOINT, "checkpoint 4 is damaged: " + "x" * 2000)
    await posting.until(lambda: bool(posting.counts))
    posting.queue.resumed(1, 3)
    await posting.until(lambda: len(posting.counts) == 2)
    first, second = api.events
    assert (first["type"], first["reason"]) == ("Warning", "CheckpointDamaged")
    assert first["message"].startswith("checkpoint 4 is damaged: xx")
    assert len(first["message"]) == 1024
    assert first["involvedObject"]["uid"] == UID
    assert first["involvedObject"]["kind"] == "TrainingRun"
    assert first["metadata"]["namespace"] == NAMESPACE
    assert first["source"] == {"component": "trainsync-monitor"}
    assert (second["type"], second["reason"]) == ("Normal", "ResumedFromCheckpoint")
    assert posting.counts == ["posted", "posted"]


async def test_one_that_is_added_while_the_poster_waits_wakes_it(api: FakeApi) -> None:
    posting = Posting(api)

    looks: list[int] = []

    def added_when_it_waits() -> bool:
        looks.append(len(api.events))
        if len(looks) == 5:
            posting.queue.resumed(1, 3)
        return bool(api.events)

    await posting.until(added_when_it_waits)
    assert posting.counts == ["posted"]


async def test_after_a_burst_they_come_slowly(api: FakeApi) -> None:
    posting = Posting(api)
    for step in range(BURST + 3):
        posting.queue.resumed(1, step)
    await posting.until(lambda: len(api.events) == BURST + 3)
    assert posting.seconds == pytest.approx(3 * SECONDS_FOR_EACH)


def test_an_allowance_fills_again_and_no_further() -> None:
    now = 0.0
    allowance = Allowance(2, 10.0, lambda: now)
    assert [allowance.take() for _ in range(4)] == [0, 0, 10, 20]
    now = 1000.0
    assert [allowance.take() for _ in range(3)] == [0, 0, 10]


@pytest.mark.parametrize("status", [None, 429, 500])
async def test_while_the_api_server_is_away_they_wait(
    api: FakeApi, caplog: pytest.LogCaptureFixture, status: int | None
) -> None:
    api.fail = KubeError(status, "away")
    waits: list[float] = []

    def waited(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            api.fail = None

    posting = Posting(api, waited)
    posting.queue.resumed(1, 3)
    with caplog.at_level(logging.WARNING):
        await posting.until(lambda: bool(api.events))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert posting.counts == ["failed"] * 8 + ["posted"]
    assert len(caplog.records) == 1
    assert "Event ResumedFromCheckpoint is not posted: away" in caplog.text


async def test_one_that_is_refused_is_given_up_and_the_next_is_posted(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    posting = Posting(api)
    api.fail = KubeError(403, "monitors may not create events")
    with caplog.at_level(logging.WARNING):
        for step in (3, 4):
            posting.queue.resumed(1, step)
            await posting.until(lambda: len(posting.counts) == step - 2)  # noqa: B023 - at once
    assert len(caplog.records) == 1
    api.fail = None
    posting.queue.resumed(1, 5)
    await posting.until(lambda: bool(api.events))
    assert posting.counts == ["failed", "failed", "posted"]


async def test_one_whose_answer_was_lost_is_there_and_counts_as_posted(api: FakeApi) -> None:
    answers = [KubeError(None, "the answer was lost"), KubeError(409, "it is there already")]

    def next_answer(_: float) -> None:
        api.fail = answers.pop(0) if answers else None

    api.fail = answers.pop(0)
    posting = Posting(api, next_answer)
    posting.queue.resumed(1, 3)
    await posting.until(lambda: len(posting.counts) == 2)
    assert posting.counts == ["failed", "posted"]


async def test_after_an_hour_it_is_given_up(api: FakeApi) -> None:
    posting = Posting(api)
    api.fail = KubeError(500, "broken")
    posting.queue.resumed(1, 3)
    await posting.until(lambda: posting.seconds > 3600)
    api.fail = None
    posting.queue.resumed(1, 4)
    await posting.until(lambda: bool(api.events))
    assert len(api.events) == 1 and "checkpoint 4" in api.events[0]["message"]
