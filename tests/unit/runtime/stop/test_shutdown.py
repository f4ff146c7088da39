"""SIGTERM in a trainer: the loop ends, staged saves are written, the others are reported."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.runtime.stop.shutdown import EXIT_CODE, GracefulShutdown, NotMainThreadError

from tests.waiting import eventually


class Saving:
    """A coordinator that writes for so long."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.given: float | None = None
        self.abandoned: list[str] = []

    def wait_all(self, timeout: float | None = None) -> None:
        self.given = timeout
        if timeout is not None and self.seconds > timeout:
            raise SaveTimeoutError("still being written: model-step4")
        self.seconds = 0.0

    def abandon(self, reason: str, timeout: float) -> list[str]:
        if self.seconds == 0.0:
            return []
        self.abandoned.append(reason)
        return ["checkpoint of step 4, model.0"]


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """What SIGTERM did before; the numbers of the signals that it got."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def no_exit(code: int) -> None:
    """The tests' own process lives on, whatever the grace period says."""


def test_without_a_signal_nothing_happens_and_the_handler_is_the_one_before(
    handler: list[int],
) -> None:
    closed: list[float] = []
    with GracefulShutdown((Saving(),), closed.append, exit_now=no_exit) as shutdown:
        assert not shutdown.requested
        assert shutdown.seconds_left == float("inf")
    terminate()
    assert handler == [signal.SIGTERM]
    assert closed == []


def test_a_signal_ends_the_loop_writes_what_is_staged_and_exits_with_143(
    handler: list[int],
) -> None:
    savings, closed, steps = (Saving(), Saving()), [], 0
    with (
        pytest.raises(SystemExit) as ended,
        GracefulShutdown(savings, closed.append, grace_seconds=20, exit_now=no_exit) as shutdown,
    ):
        for steps in range(10):
            if shutdown.requested:
                break
            if steps == 3:
                terminate()
    assert steps == 4
    assert ended.value.code == EXIT_CODE == 143
    assert all(saving.given is not None and 10 < saving.given < 20 for saving in savings)
    assert all(saving.abandoned == [] for saving in savings)
    assert len(closed) == 1
    assert 0 < closed[0] <= 20 - 3, "what closes ends before the process is ended"
    assert handler == []


def test_what_cannot_be_written_in_time_is_reported_with_the_reason(handler: list[int]) -> None:
    slow, quick = Saving(seconds=100), Saving()
    with (
        pytest.raises(SystemExit),
        GracefulShutdown((slow, quick), lambda _: None, grace_seconds=20, exit_now=no_exit),
    ):
        terminate()
    assert quick.given is not None
    assert len(slow.abandoned) == 1
    assert "SIGTERM" in slow.abandoned[0]


def test_a_loop_that_is_never_left_is_ended_in_time_and_what_is_unwritten_is_reported(
    handler: list[int],
) -> None:
    ended: list[int] = []
    saving = Saving(seconds=100)
    with (
        pytest.raises(SystemExit),
        GracefulShutdown((saving,), lambda _: None, grace_seconds=0.4, exit_now=ended.append),
    ):
        terminate()
        started = time.monotonic()
        eventually(lambda: ended == [EXIT_CODE])
        assert time.monotonic() - started < 5
        assert len(saving.abandoned) == 1


def test_a_second_signal_goes_where_it_went_before(handler: list[int]) -> None:
    with (
        pytest.raises(SystemExit),
        GracefulShutdown((), lambda _: None, grace_seconds=20, exit_now=no_exit),
    ):
        terminate()
        assert handler == []
        terminate()
        assert handler == [signal.SIGTERM]


def test_an_error_after_the_signal_still_ends_with_143_and_before_it_is_itself(
    handler: list[int],
) -> None:
    with pytest.raises(SystemExit) as ended, GracefulShutdown((), lambda _: None, exit_now=no_exit):
        terminate()
        raise RuntimeError("the other ranks are gone")
    assert isinstance(ended.value.__cause__, RuntimeError)
    with (
        pytest.raises(RuntimeError, match="a bug"),
        GracefulShutdown((), lambda _: None, exit_now=no_exit),
    ):
        raise RuntimeError("a bug")


def test_a_close_that_fails_does_not_change_how_it_ends(handler: list[int]) -> None:
    def fail(seconds: float) -> None:
        raise OSError("no disk")

    with pytest.raises(SystemExit) as ended, GracefulShutdown((), fail, exit_now=no_exit):
        terminate()
    assert ended.value.code == EXIT_CODE


def test_only_the_main_thread_can_ask_for_it() -> None:
    errors: list[Exception] = []

    def enter() -> None:
        try:
            GracefulShutdown((), lambda _: None).__enter__()
        except NotMainThreadError as error:
            errors.append(error)

    thread = threading.Thread(target=enter, name="worker-7")
    thread.start()
    thread.join(20)
    assert len(errors) == 1
    assert "'worker-7'" in str(errors[0])


def test_no_grace_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="grace_seconds is 0"):
        GracefulShutdown((), lambda _: None, grace_seconds=0)


PROGRAM = """
import signal, sys, time
from trainsync.runtime.stop.shutdown import GracefulShutdown
signal.signal(signal.SIGTERM, getattr(signal, sys.argv[1]))
with GracefulShutdown((), lambda seconds: None, grace_seconds=float(sys.argv[2])) as shutdown:
    print("ready", flush=True)
    while not shutdown.requested:
        time.sleep(0.01)  # lets the signal's handler run
    print("told", flush=True)
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("before", ["SIG_DFL", "SIG_IGN"])
@pytest.mark.parametrize(("signals", "grace", "status"), [(1, 0.3, 143), (2, 60, -signal.SIGTERM)])
def test_a_real_process_ends_in_time_or_at_once_when_told_twice(
    before: str, signals: int, grace: float, status: int
) -> None:
    words = [sys.executable, "-c", PROGRAM, before, str(grace)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            if signals == 2:  # two that wait together are one
                assert process.stdout.readline() == "told\n"
                process.terminate()
            assert process.wait(30) == status
        finally:
            process.kill()


def test_a_forked_process_dies_of_the_signal_and_leaves_its_parents_saves_alone(
    handler: list[int],
) -> None:
    saving = Saving(seconds=60.0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with GracefulShutdown((saving,), no_exit, grace_seconds=60, exit_now=no_exit) as shutdown:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # should it not die, it must not stay
            os.write(told, b"!")  # what comes before Python has forked to the end is lost
            while True:  # until the signal; it ends in Python, between two calls
                time.sleep(0.01)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not shutdown.requested
    assert saving.abandoned == []


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_ignored_the_signal_before_ignores_it_afterwards(
    handler: list[int], before: signal.Handlers
) -> None:
    signal.signal(signal.SIGTERM, before)
    with GracefulShutdown((), no_exit, exit_now=no_exit):
        pass
    assert signal.getsignal(signal.SIGTERM) is before
