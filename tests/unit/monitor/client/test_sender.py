"""`LatestWinsSender`: the newest report reaches the monitor, and the trainer never waits for it."""

import threading
import time

import pytest
from trainsync.api.protocol import ProgressReport
from trainsync.monitor.client.sender import LatestWinsSender
from trainsync.monitor.errors import MonitorUnavailableError

from tests.waiting import eventually


def test_submitting_never_waits_for_a_monitor_that_hangs() -> None:
    release = threading.Event()
    sent: list[int] = []

    def send(report: ProgressReport) -> None:
        assert release.wait(30)
        sent.append(report.step)

    sender = LatestWinsSender("test", send)
    started = time.monotonic()
    for step in range(1000):
        sender.submit(ProgressReport(step=step))
    assert time.monotonic() - started < 5
    release.set()
    assert sender.close(30)
    assert sent[-1] == 999
    assert sender.stats.sent == len(sent) <= 2
    assert sender.stats.superseded == 1000 - len(sent)


def test_a_report_that_fails_is_counted_and_the_next_is_sent() -> None:
    sent: list[int] = []

    def send(report: ProgressReport) -> None:
        if report.step == 1:
            raise MonitorUnavailableError("away")
        sent.append(report.step)

    sender = LatestWinsSender("test", send)
    sender.submit(ProgressReport(step=1))
    eventually(lambda: sender.stats.failed == 1)
    sender.submit(ProgressReport(step=2))
    assert sender.close(30)
    assert sent == [2]
    assert isinstance(sender.stats.last_error, MonitorUnavailableError)


def test_the_newest_report_reaches_a_monitor_that_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainsync.monitor.client.sender.AGAIN_SECONDS", 0.01)
    sent: list[int] = []
    tried: list[int] = []
    back = threading.Event()

    def send(report: ProgressReport) -> None:
        tried.append(report.step)
        if not back.is_set():
            raise MonitorUnavailableError("away")
        sent.append(report.step)

    sender = LatestWinsSender("test", send, (MonitorUnavailableError,))
    sender.submit(ProgressReport(step=1))
    eventually(lambda: tried.count(1) >= 3)
    sender.submit(ProgressReport(step=2))
    eventually(lambda: tried.count(2) >= 3)
    back.set()
    eventually(lambda: sent == [2])
    assert sender.close(30)
    assert tried == sorted(tried)


@pytest.mark.parametrize("is_back", [True, False])
def test_close_waits_for_one_more_try_of_the_last_report(is_back: bool) -> None:
    tried: list[int] = []

    def send(report: ProgressReport) -> None:
        tried.append(report.step)
        if len(tried) == 1 or not is_back:
            raise MonitorUnavailableError("away")

    sender = LatestWinsSender("test", send, (MonitorUnavailableError,))
    sender.submit(ProgressReport(step=7))
    eventually(lambda: sender.stats.failed == 1)
    assert sender.close(30)
    assert tried == [7, 7]
    assert sender.stats.sent == is_back


def test_a_report_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainsync.monitor.client.sender.AGAIN_SECONDS", 0.001)
    monkeypatch.setattr("trainsync.monitor.client.sender.TRIES", 3)

    def send(_: ProgressReport) -> None:
        raise MonitorUnavailableError("away")

    sender = LatestWinsSender("test", send, (MonitorUnavailableError,))
    sender.submit(ProgressReport(step=1))
    eventually(lambda: sender.stats.failed == 3)
    sender.submit(ProgressReport(step=2))
    eventually(lambda: sender.stats.failed == 6)
    assert sender.close(30)
    assert sender.stats.failed == 6
