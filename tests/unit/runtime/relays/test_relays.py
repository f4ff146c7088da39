"""`WeightsRelay`: an answer that is an error ends nothing as long as Ray is there. No Ray."""

import threading
import time
from collections.abc import Callable

import pytest
from trainsync.api.protocol import WeightsReport
from trainsync.runtime.relays.monitor_relays import WeightsRelay
from trainsync.weights import threads

Answer = tuple[int, WeightsReport] | None
TIMEOUT = 20.0


def report(version: int) -> WeightsReport:
    return WeightsReport(trainer_version=version, method="nccl", explorers=[])


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set while Ray is there."""
    event = threading.Event()
    event.set()
    monkeypatch.setattr(threads, "ray_is_there", event.is_set)
    return event


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], Answer]) -> None:
    """The Synchronizer's answers, by the number of the question."""
    asked = iter(range(1_000_000))

    def ask(self: WeightsRelay, seen: int, seconds: float) -> Answer:
        return answer(next(asked))

    monkeypatch.setattr(WeightsRelay, "_ask", ask)


def test_a_question_that_fails_is_asked_again_as_long_as_ray_is_there(
    monkeypatch: pytest.MonkeyPatch, there: threading.Event
) -> None:
    sent: list[WeightsReport] = []
    told = threading.Event()

    def answer(number: int) -> Answer:
        if number < 3:
            raise RuntimeError("no report can be made")
        told.wait(0.01)
        return None if sent else (1, report(7))

    def send(one: WeightsReport) -> None:
        sent.append(one)
        told.set()

    answering(monkeypatch, answer)
    one = WeightsRelay(lambda: None, send, retry_seconds=0.01)
    try:
        assert told.wait(TIMEOUT), "the relay asks no more"
        assert [r.trainer_version for r in sent] == [7]
        assert "no report can be made" in str(one.last_error)
    finally:
        assert one.close(TIMEOUT)


def test_it_ends_when_ray_is_gone(monkeypatch: pytest.MonkeyPatch, there: threading.Event) -> None:
    def answer(number: int) -> Answer:
        there.clear()
        raise RuntimeError("Ray is gone")

    answering(monkeypatch, answer)
    one = WeightsRelay(lambda: None, lambda one: None, retry_seconds=0.01)
    deadline = time.monotonic() + TIMEOUT
    while one.running:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert "Ray is gone" in str(one.last_error)
    assert one.close(TIMEOUT)


def test_closing_does_not_wait_to_ask_again(
    monkeypatch: pytest.MonkeyPatch, there: threading.Event
) -> None:
    failed = threading.Event()

    def answer(number: int) -> Answer:
        failed.set()
        raise RuntimeError("no report can be made")

    answering(monkeypatch, answer)
    one = WeightsRelay(lambda: None, lambda one: None, retry_seconds=10 * TIMEOUT)
    assert failed.wait(TIMEOUT)
    assert one.close(TIMEOUT)
