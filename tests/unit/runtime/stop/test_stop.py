"""The pods' preStop command, and the listener of a training loop, without a monitor."""

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch.distributed as dist
from trainsync.api import env
from trainsync.api.protocol import StopNotice, StopPoll
from trainsync.api.status import StopReason
from trainsync.dist.rank_zero import RankZero
from trainsync.monitor.errors import FencedError, MonitorUnavailableError, NotServedError
from trainsync.runtime.description import is_due
from trainsync.runtime.settings import read_settings
from trainsync.runtime.stop.hook import wait
from trainsync.runtime.stop.listener import StopListener
from trainsync.runtime.stop.stopping import StopRequests

from tests.waiting import eventually

SINCE = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("words", "ended", "seconds"),
    [
        (["go"], "nothing is to be waited for", 0),
        (["unknown", "wait", "wait", "go"], "nothing is to be waited for", 1.5),
        (["wait", "unknown"], "the request is over", 0.5),
        (["unknown"], "no save was asked for", 20),
        (["away"], "the monitor is away", 3),
        (["away"] * 3 + ["unknown"], "no save was asked for", 20),
        (["wait", "away", "away", "wait", "go"], "nothing is to be waited for", 2),
        (["wait", "away"], "the monitor is away", 60),
        (["wait"], "90 s are over", 90),
    ],
)
def test_a_pod_waits_for_a_save_that_was_asked_for_and_for_nothing_else(
    words: list[str], ended: str, seconds: float
) -> None:
    clock, asked = Clock(), iter(words)
    last = words[0]

    def question() -> str:
        nonlocal last
        last = next(asked, last)
        if last == "away":
            raise OSError("no route")
        return last

    assert wait(90, question, clock, clock.sleep) == ended
    assert clock.now == pytest.approx(seconds)


class Monitor:
    """Answers polls with what the test sets."""

    def __init__(self) -> None:
        self.polls: list[StopPoll] = []
        self.notice: StopNotice | None = None
        self.error: Exception | None = None
        self.changed = threading.Event()

    def poll_stop(self, poll: StopPoll, wait_seconds: float = 0.0) -> StopNotice | None:
        self.polls.append(poll)
        if self.error is not None:
            raise self.error
        known = self.notice.since if self.notice else None
        if poll.since == known and wait_seconds:
            self.changed.wait(0.01)
        return self.notice


def test_the_listener_answers_once_and_again_for_the_next_request() -> None:
    monitor = Monitor()
    listener = StopListener(monitor)
    assert (listener.stop, listener.answer(3)) == (None, False)
    monitor.notice = StopNotice(since=SINCE, reason=StopReason.PREEMPTION, seconds_left=60)
    eventually(lambda: listener.stop is not None)
    assert (listener.answer(4), listener.answer(5), listener.answered) == (True, False, 4)
    eventually(lambda: StopPoll(since=SINCE, step=4) in monitor.polls)
    again = SINCE.replace(second=9)
    monitor.notice = StopNotice(since=again, reason=StopReason.SUSPEND, seconds_left=60)
    eventually(lambda: listener.stop is not None and listener.stop.since == again)
    assert (listener.answered, listener.answer(8), listener.answered) == (None, True, 8)
    monitor.notice = None
    eventually(lambda: listener.stop is None)
    assert listener.close(1.0)


def test_a_monitor_away_or_older_is_asked_again_and_one_of_the_next_attempt_is_not() -> None:
    for error, goes_on in (
        (MonitorUnavailableError("away"), True),
        (NotServedError("404"), True),
        (FencedError("attempt 4 is in force"), False),
    ):
        monitor = Monitor()
        monitor.error = error
        listener = StopListener(monitor, away=0.01, older=0.01)
        eventually(lambda: len(monitor.polls) > 0)  # noqa: B023
        if goes_on:
            eventually(lambda: len(monitor.polls) > 2)  # noqa: B023
        else:
            eventually(lambda: not listener._thread.is_alive())  # noqa: B023
        assert listener.stop is None
        listener.close(1.0)


def test_a_request_whose_time_is_long_over_holds_no_loop() -> None:
    clock, monitor = Clock(), Monitor()
    monitor.notice = StopNotice(since=SINCE, reason=StopReason.SUSPEND, seconds_left=60)
    listener = StopListener(monitor, monotonic=clock)
    eventually(lambda: listener.stop is not None)
    assert listener.answer(4)
    clock.now = 91
    assert (listener.stop, listener.answered) == (None, None)
    listener.close(1.0)


def test_all_ranks_save_the_same_step_whoever_comes_first(
    tmp_path: Path,
) -> None:
    store = dist.HashStore()
    environ = {
        env.RUN_NAME: "run",
        env.RUN_NAMESPACE: "team",
        env.RUN_UID: "u",
        env.CLUSTER: "main",
        env.ATTEMPT: "0",
        env.INCARNATION: "aaaaaaaa",
        env.MONITOR_URL: "http://monitor",
        env.TOKEN_FILE: str(tmp_path / "token"),
        env.CHECKPOINT_DIR: str(tmp_path),
        env.CHECKPOINT_INTERVAL: "5",
    }
    settings, monitor = read_settings(environ, None), Monitor()
    saved: dict[int, list[int]] = {0: [], 1: []}
    # As a collective in each step keeps the ranks.
    together = threading.Barrier(2)
    loops: dict[int, StopRequests] = {}

    def train(number: int) -> None:
        ranks = RankZero(store, number, 2, kept=3)
        loop = loops[number] = StopRequests(settings, lambda: monitor, lambda: ranks)
        for step in range(1, 13):
            together.wait(20)
            if step == 7 and number == 0:
                monitor.notice = StopNotice(since=SINCE, reason=StopReason.SUSPEND, seconds_left=60)
                eventually(lambda: loop.listener is not None and loop.listener.stop is not None)
            if loop.saves(step, due=is_due(step, settings.checkpoint.interval)):
                saved[number].append(step)
            # Asked twice, a loop is told the same.
            assert loop.saves(step, due=is_due(step, settings.checkpoint.interval)) == (
                step in saved[number]
            )

    threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert saved == {0: [5, 7, 10], 1: [5, 7, 10]}
    assert store.num_keys() <= 3, "words of steps gone by are kept"
    loops[1].wait(lambda: False)
    listener = loops[0].listener
    assert listener is not None
    assert listener.answered == 7
    listener.close(1.0)
