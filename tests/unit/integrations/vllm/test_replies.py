"""A call that a worker fails in leaves no reply for the next call."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.integrations.vllm.replies import read_all_replies, reading_all


class _Queue:
    """The replies of a worker; an exception is a failure."""

    def __init__(self, *replies: Any) -> None:
        self.replies = deque(replies)
        self.timeouts: list[float | None] = []

    def dequeue(self, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        if not self.replies:
            raise TimeoutError
        return self.replies.popleft()


def _call(queues: list[_Queue], deadline: float | None = None) -> Callable[[], Any]:
    """As in vLLM 0.32."""
    response_mqs: Any = queues

    def get_response() -> list[Any]:
        responses = []
        for mq in response_mqs:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            result = mq.dequeue(timeout=timeout)
            if isinstance(result, Exception):
                raise RuntimeError(f"Worker failed with error '{result}'")
            responses.append(result)
        return responses

    return get_response


def _wrong(text: str) -> Exception:
    return ValueError(text)


@pytest.mark.parametrize(
    "failed",
    [
        (_wrong("one"), _wrong("two"), _wrong("three")),
        ("done", _wrong("two"), "done"),
        (_wrong("one"), "done", "done"),
        ("done", "done", _wrong("three")),
    ],
)
def test_the_call_after_a_failed_one_gets_its_own_replies(failed: tuple[Any, ...]) -> None:
    queues = [_Queue(reply, f"next {n}") for n, reply in enumerate(failed)]
    with pytest.raises(RuntimeError, match="Worker failed with error"):
        reading_all(_call(queues))()
    assert reading_all(_call(queues))() == ["next 0", "next 1", "next 2"]


def test_replies_behind_a_failure_are_waited_for_as_long_as_the_call_has() -> None:
    behind = _Queue("done")
    with pytest.raises(RuntimeError):
        reading_all(_call([_Queue(_wrong("one")), behind], time.monotonic() + 60))()
    (timeout,) = behind.timeouts
    assert timeout is not None
    assert 0 < timeout <= 60
    with pytest.raises(TimeoutError):  # the worker may reply yet: nothing is as it should be
        reading_all(_call([_Queue(_wrong("one")), _Queue()], time.monotonic() - 1))()


def test_a_function_of_another_kind_stays_as_it_is() -> None:
    def other() -> int:
        return 1

    assert reading_all(other) is other


def test_an_executors_calls_read_all_once_told_and_a_second_time_changes_nothing() -> None:
    class FutureWrapper(Future[Any]):
        def __init__(self, futures_queue: Any, get_response: Any, aggregate: Any = None) -> None:
            super().__init__()
            self.get_response = get_response

    executors = SimpleNamespace(FutureWrapper=FutureWrapper)
    read_all_replies(executors)
    told = executors.FutureWrapper
    read_all_replies(executors)
    assert executors.FutureWrapper is told
    queues = [_Queue(_wrong("one"), "next"), _Queue("done", "next")]
    with pytest.raises(RuntimeError):
        told(deque(), get_response=_call(queues), aggregate=None).get_response()
    assert told(deque(), get_response=_call(queues)).get_response() == ["next", "next"]
    read_all_replies(SimpleNamespace())  # a vLLM that has none of it
