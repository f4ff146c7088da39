"""`Pulse` and `calling_ray`: threads that speak with Ray are woken in time, and end before it."""

import threading
import time

import pytest
from trainsync.weights import threads
from trainsync.weights.heartbeat import Pulse


def test_a_sign_of_life_is_due_at_once_when_there_is_news_and_once_only() -> None:
    pulse = Pulse()
    threading.Timer(0.02, pulse.beat).start()
    started = time.monotonic()
    assert pulse.wait(20.0) is False
    assert time.monotonic() - started < 10.0
    assert pulse.wait(0.01) is False


def test_there_are_no_more_once_it_is_over() -> None:
    pulse = Pulse()
    pulse.beat()
    pulse.set()
    assert pulse.is_set()
    assert pulse.wait(20.0) is True


def test_ray_is_not_called_any_more_once_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "ray_is_there", lambda: True)
    monkeypatch.setattr(threads, "_calls", threads._Calls())
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        with threads.calling_ray() as allowed:
            assert allowed
            entered.set()
            leave.wait(20.0)

    caller = threading.Thread(target=call)
    caller.start()
    assert entered.wait(20.0)
    threading.Timer(0.05, leave.set).start()
    threads._calls.close(20.0)
    assert leave.is_set(), "a call that goes on is waited for"
    caller.join(20.0)
    with threads.calling_ray() as allowed:
        assert not allowed
