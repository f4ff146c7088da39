"""`RenewalTimer` and `calling_ray`: threads that call Ray wake in time, and end before Ray."""

import logging
import threading
import time
import weakref

import pytest
from trainsync.weights import threads
from trainsync.weights.errors import WeightsError
from trainsync.weights.synchronizer.connection import RenewalTimer, renew_until


def test_a_sign_of_life_is_due_at_once_when_there_is_news_and_once_only() -> None:
    pulse = RenewalTimer()
    threading.Timer(0.02, pulse.beat).start()
    started = time.monotonic()
    assert pulse.wait(20.0) is False
    assert time.monotonic() - started < 10.0
    assert pulse.wait(0.01) is False


def test_there_are_no_more_once_it_is_over() -> None:
    pulse = RenewalTimer()
    pulse.beat()
    pulse.set()
    assert pulse.is_set()
    assert pulse.wait(20.0) is True


class Troubled:
    """Lives, but cannot always say so."""

    def __init__(self, *troubles: Exception | None) -> None:
        self.pulse = RenewalTimer()
        self.calls = 0
        self._troubles = list(troubles)

    def lasts(self) -> bool:
        return threads.ray_is_there()

    def renew(self, timeout: float) -> None:
        self.calls += 1
        trouble = self._troubles.pop(0)
        if not self._troubles:
            self.pulse.set()
        if trouble is not None:
            raise trouble


def test_signs_of_life_go_on_whatever_goes_wrong_and_it_is_told_once_in_a_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "ray_is_there", lambda: True)
    first, second = RuntimeError("first"), WeightsError("second")
    one = Troubled(first, ValueError("more"), WeightsError("more"), None, second, None)
    with caplog.at_level(logging.WARNING):
        renew_until(weakref.ref(one), one.pulse, 0.001, lambda: None)
    assert one.calls == 6
    assert [record.message for record in caplog.records] == [
        "no sign of life could be given: first",
        "no sign of life could be given: second",
    ]


def test_signs_of_life_end_with_ray(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = iter([True, False])
    monkeypatch.setattr(threads, "ray_is_there", lambda: next(there))
    one = Troubled(RuntimeError("Ray is down"), None)
    with caplog.at_level(logging.WARNING):
        renew_until(weakref.ref(one), one.pulse, 0.001, lambda: None)
    assert one.calls == 1
    assert not caplog.records


def test_ray_is_not_called_any_more_once_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "ray_is_there", lambda: True)
    monkeypatch.setattr(threads, "_calls", threads._RayCalls())
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
