"""`SaveWatch`: what the registering process learns of its saves, with monitors that misbehave."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind, SaveRequest, SaveState, SaveStatus
from trainsync.checkpoint.errors import SaveAbortedError, SaveTimeoutError
from trainsync.checkpoint.save.registration import Participants
from trainsync.checkpoint.save.watch import SaveWatch, WatchTimes
from trainsync.monitor.errors import (
    ClientClosedError,
    InvalidRequestError,
    MonitorUnavailableError,
)

SAVE = Participants(3, state_dict=(("model", 0),), checkpoint=(("optim", 0),))
LATER = Participants(4, checkpoint=(("optim", 0),))


class Monitor:
    """Refuses registrations with ``refusals``, one after another; then saves end as scripted."""

    incarnation = "a"

    def __init__(self, *refusals: Exception, error: str | None = None) -> None:
        self.refusals = list(refusals)
        self.error = error
        self.failure: Exception | None = None
        self.registered: list[tuple[SaveKind, int]] = []
        self.asked: list[SaveKind] = []
        self.answers = threading.Event()
        self.ends = threading.Event()
        self.answers.set()
        self.ends.set()

    def register(self, request: SaveRequest) -> SaveStatus:
        assert self.answers.wait(30)
        if self.refusals:
            raise self.refusals.pop(0)
        self.registered.append((request.kind, request.step))
        return SaveStatus(kind=request.kind, step=request.step, state=SaveState.REGISTERED)

    def save_status(self, kind: SaveKind, step: int, wait_seconds: float = 0.0) -> SaveStatus:
        self.asked.append(kind)
        if self.failure is not None:
            raise self.failure
        state = SaveState.REGISTERED
        if self.ends.wait(wait_seconds):
            state = SaveState.COMMITTED if self.error is None else SaveState.ABORTED
        return SaveStatus(kind=kind, step=step, state=state, error=self.error)


class Away(Monitor):
    """Cannot be reached while ``away``."""

    def __init__(self) -> None:
        super().__init__()
        self.away = threading.Event()
        self.away.set()

    def register(self, request: SaveRequest) -> SaveStatus:
        if self.away.is_set():
            raise MonitorUnavailableError("away")
        return super().register(request)


Watch = Callable[..., SaveWatch]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Makes a `SaveWatch` of a monitor; what it still waits for ends with the test."""
    monitors: list[Monitor] = []

    def make(
        monitor: Any,  # as much of a client
        known: set[tuple[SaveKind, int]] | None = None,
        **times: float,
    ) -> SaveWatch:
        monitors.append(monitor)
        return SaveWatch(monitor, known or set(), 30, WatchTimes(**times))

    yield make
    for monitor in monitors:
        monitor.answers.set()
        monitor.ends.set()


def test_the_state_dict_is_awaited_before_the_checkpoint_that_reuses_it(watch: Watch) -> None:
    monitor = Monitor()
    watching = watch(monitor)
    watching.register(SAVE)
    watching.wait(30)
    assert monitor.registered == [(SaveKind.STATE_DICT, 3), (SaveKind.CHECKPOINT, 3)]
    assert monitor.asked == [SaveKind.STATE_DICT, SaveKind.CHECKPOINT]


def test_a_monitor_that_is_away_is_asked_again(watch: Watch) -> None:
    monitor = Monitor(MonitorUnavailableError("away"), MonitorUnavailableError("away"))
    watching = watch(monitor, retry=0.0)
    watching.register(SAVE)
    watching.wait(30)
    assert monitor.registered == [(SaveKind.STATE_DICT, 3), (SaveKind.CHECKPOINT, 3)]


def test_a_monitor_that_is_away_for_many_saves_does_not_cost_a_thread_for_each(
    watch: Watch,
) -> None:
    monitor = Away()
    watching = watch(monitor, retry=0.01)
    before = threading.active_count()
    for step in range(100):
        watching.register(Participants(step, checkpoint=(("optim", 0),)))
        assert threading.active_count() <= before + 3  # one may be about to end
    monitor.away.clear()
    watching.wait(30)
    assert sorted(step for _, step in monitor.registered) == list(range(100))
    assert len(monitor.asked) == 100


def test_the_end_of_a_save_is_heard_while_an_older_one_stays_open(watch: Watch) -> None:

    class AbortsTheLater(Monitor):
        def save_status(self, kind: SaveKind, step: int, wait_seconds: float = 0.0) -> SaveStatus:
            if step != LATER.step:
                return super().save_status(kind, step, wait_seconds)
            return SaveStatus(kind=kind, step=step, state=SaveState.ABORTED, error="no space")

    monitor = AbortsTheLater()
    monitor.ends.clear()
    watching = watch(monitor, shared_poll=0.01, poll=0.01)
    watching.register(SAVE)
    watching.register(LATER)
    assert watching._followed[1].ended.wait(30)
    assert not watching._followed[0].ended.is_set()
    with pytest.raises(SaveAbortedError, match="no space"):
        watching.raise_failure()


def test_a_monitor_that_does_not_answer_keeps_the_caller_once(watch: Watch) -> None:
    monitor = Monitor()
    monitor.answers.clear()
    watching = watch(monitor)
    began = time.monotonic()
    watching.register(SAVE, patience=0.2)
    assert 0.2 <= time.monotonic() - began < 20
    watching.register(LATER, patience=3600)
    assert time.monotonic() - began < 20
    assert monitor.registered == []
    monitor.answers.set()
    watching.wait(30)
    assert sorted(monitor.registered) == [
        (SaveKind.CHECKPOINT, 3),
        (SaveKind.CHECKPOINT, 4),
        (SaveKind.STATE_DICT, 3),
    ]


def test_a_refusal_is_raised_once(watch: Watch) -> None:
    watching = watch(Monitor(InvalidRequestError("other participants")))
    watching.register(SAVE)
    assert watching._followed[0].ended.wait(30)
    watching.register(LATER)  # nor does another one raise it
    with pytest.raises(InvalidRequestError, match="other participants"):
        watching.wait(30)
    watching.raise_failure()


def test_a_refusal_in_time_is_raised_at_once(watch: Watch) -> None:
    watching = watch(Monitor(InvalidRequestError("other participants")))
    with pytest.raises(InvalidRequestError, match="other participants"):
        watching.register(SAVE, patience=30)
    watching.raise_failure()


@pytest.mark.parametrize("tolerant", [False, True])
def test_an_abort_is_raised_unless_it_was_to_be_expected(watch: Watch, tolerant: bool) -> None:
    watching = watch(Monitor(error="no space"))
    watching.register(SAVE, tolerant=tolerant)
    if tolerant:
        watching.wait(30)
    else:
        with pytest.raises(SaveAbortedError, match="no space"):
            watching.wait(30)


def test_an_abort_that_the_caller_knows_and_a_skip_are_not_raised(watch: Watch) -> None:
    watching = watch(Monitor(error="no space"), {(SaveKind.STATE_DICT, 3)})
    watching.register(SAVE)
    watching.wait(30)
    watching = watch(Monitor(error="model.1: SaveSkippedError: 2 saves were staged"))
    watching.register(SAVE)
    watching.wait(30)


def test_a_client_that_is_closed_meanwhile_is_no_failure(watch: Watch) -> None:
    monitor = Monitor()
    monitor.failure = ClientClosedError("closed")
    watching = watch(monitor)
    watching.register(SAVE)
    watching.wait(30)


def test_a_save_that_a_closed_client_could_not_register_is_a_failure(watch: Watch) -> None:
    watching = watch(Monitor(ClientClosedError("the client is closed")))
    watching.register(SAVE)
    with pytest.raises(ClientClosedError):
        watching.wait(30)


def test_waiting_ends_at_its_deadline_and_goes_on_later(watch: Watch) -> None:
    monitor = Monitor()
    monitor.ends.clear()
    watching = watch(monitor, poll=0.05)
    watching.register(SAVE)
    with pytest.raises(SaveTimeoutError, match=r"step 3 was not committed within 0\.05 s"):
        watching.wait(0.05)
    monitor.ends.set()
    watching.wait(30)
