"""A version is prepared by a thread that ends whatever happens, and leaves nothing behind."""

import threading
from collections.abc import Callable, Iterator

import pytest
from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.servers.preparing import PreparationOutcome
from trainsync.integrations.vllm import preparing
from trainsync.integrations.vllm.errors import NoRoomError, UnpreparableError
from trainsync.integrations.vllm.preparing import PreparedVersion, PreparingThread
from trainsync.integrations.vllm.replacement import Replacement

from tests.waiting import eventually

_GoOn = Callable[[], None]


class Prepared:
    """A version whose comparison has ``pieces``, the last of which may fail."""

    def __init__(self, pieces: int = 3, error: Exception | None = None) -> None:
        self.compared_by: list[str] = []
        self.freed = 0
        self._pieces = pieces
        self._error = error
        self.version = PreparedVersion(Replacement((), ()), self._compare(), self._free)

    def _compare(self) -> Iterator[None]:
        for _ in range(self._pieces):
            self.compared_by.append(threading.current_thread().name)
            yield
        if self._error is not None:
            raise self._error

    def _free(self) -> None:
        self.freed += 1


def _ended(thread: PreparingThread) -> tuple[PreparationOutcome | None, str]:
    eventually(lambda: thread.ask()[0] is not None)
    return thread.ask()


def test_prepared_weights_are_taken_once() -> None:
    made = Prepared()
    thread = PreparingThread(lambda go_on: made.version, "version 1", 60)
    assert _ended(thread) == (PreparationOutcome.PREPARED, "")
    assert made.freed == 1
    assert thread.take() is made.version
    assert thread.take() is None


def test_the_thread_that_serves_compares_the_layers_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparing, "_SLICE_SECONDS", 0)
    made = Prepared(pieces=3)
    thread = PreparingThread(lambda go_on: made.version, "version 1", 60)
    eventually(lambda: thread.ask() == (None, "") and len(made.compared_by) == 1)
    assert thread.ask() == (None, "")
    assert len(made.compared_by) == 2
    assert _ended(thread)[0] is PreparationOutcome.PREPARED
    assert set(made.compared_by) == {threading.current_thread().name}


def test_weights_that_were_not_compared_yet_are_not_taken() -> None:
    made = Prepared()
    ready = threading.Event()

    def work(go_on: _GoOn) -> PreparedVersion:
        ready.set()
        return made.version

    thread = PreparingThread(work, "version 1", 60)
    assert ready.wait(30)
    assert thread.take() is None
    assert made.freed == 1
    assert thread.ask() == (PreparationOutcome.LATE, "it was given up")


def test_other_weights_than_were_staged_are_let_go() -> None:
    made = Prepared(error=ValueError("a layer has other weights"))
    thread = PreparingThread(lambda go_on: made.version, "version 1", 60)
    assert _ended(thread) == (PreparationOutcome.FAILED, "a layer has other weights")
    assert made.freed == 1
    assert thread.take() is None


def test_a_preparation_that_goes_on_is_given_up_by_an_update_that_begins() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(go_on: _GoOn) -> PreparedVersion:
        begun.set()
        try:
            while True:
                go_on()
        finally:
            ended.set()

    thread = PreparingThread(work, "version 1", 60)
    assert begun.wait(30)
    assert thread.ask() == (None, "")
    assert thread.take() is None
    assert ended.is_set()
    assert thread.ask()[0] is PreparationOutcome.LATE


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnpreparableError("attention"), PreparationOutcome.IMPOSSIBLE),
        (NoRoomError("attention"), PreparationOutcome.NO_MEMORY),
        (MemoryError("attention"), PreparationOutcome.NO_MEMORY),
        (RuntimeError("attention"), PreparationOutcome.FAILED),
    ],
)
def test_a_preparation_that_fails_tells_why(error: Exception, outcome: PreparationOutcome) -> None:
    def work(go_on: _GoOn) -> PreparedVersion:
        raise error

    thread = PreparingThread(work, "version 1", 60)
    assert _ended(thread) == (outcome, "attention")
    assert thread.take() is None


def test_prepared_weights_that_no_update_takes_are_let_go() -> None:
    made = Prepared()
    thread = PreparingThread(lambda go_on: made.version, "version 1", 0.01)
    eventually(lambda: thread.ask()[0] is PreparationOutcome.LATE)
    assert made.freed
    assert thread.take() is None


def test_a_preparation_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_STOP_SECONDS", 0.01)
    may_end = threading.Event()

    def work(go_on: _GoOn) -> PreparedVersion:
        may_end.wait(60)
        return Prepared().version

    thread = PreparingThread(work, "version 1", 60)
    with pytest.raises(Exception, match="the preparation of version 1 did not end"):
        thread.abandon()
    may_end.set()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 1e30])
def test_weights_that_could_not_be_let_go_in_time_are_not_prepared(seconds: float) -> None:
    begun = threading.Event()

    def work(go_on: _GoOn) -> PreparedVersion:
        begun.set()
        return Prepared().version

    with pytest.raises(EngineUpdateError, match="version 1 cannot be kept for"):
        PreparingThread(work, "version 1", seconds)
    assert not begun.is_set()
