"""Threads behind the trainer, when the system has none left."""

import threading
from collections.abc import Callable

import pytest
from trainsync.checkpoint.save.background import BackgroundWrites
from trainsync.checkpoint.save.stats import Counters

NO_THREAD = RuntimeError("can't start new thread")


def test_a_save_that_no_thread_was_found_for_is_not_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes, queued, written = BackgroundWrites(Counters()), [], []

    def refuse(run: Callable[..., None], *arguments: object) -> None:
        queued.append(lambda: run(*arguments))
        raise NO_THREAD

    monkeypatch.setattr(writes._workers, "submit", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        writes.start("model", "step 1", written.append)
    queued[0]()
    assert written == []
    assert writes.wait(0) == []


def test_a_save_that_a_worker_took_although_no_thread_was_left_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes, written = BackgroundWrites(Counters()), []

    def take(run: Callable[..., None], *arguments: object) -> None:
        run(*arguments)
        raise NO_THREAD

    monkeypatch.setattr(writes._workers, "submit", take)
    writes.start("model", "step 1", written.append)
    assert len(written) == 1
    assert writes.wait(0) == []


def test_saves_of_one_name_are_written_one_after_the_other() -> None:
    writes, go, written = BackgroundWrites(Counters()), threading.Event(), []

    def save(before: threading.Event, step: int) -> None:
        if step == 1:
            assert go.wait(30)
        before.wait()
        written.append(step)

    for step in (1, 2):
        writes.start("model", f"step {step}", save, step)
    assert writes.wait(0.1) == ["step 2"]
    go.set()
    assert writes.wait(30) == []
    assert written == [1, 2]


def test_a_process_that_ends_does_not_wait_for_a_monitor_that_is_away() -> None:
    writes, reporters, told = BackgroundWrites(Counters()), [], threading.Event()

    def report() -> None:
        reporters.append(threading.current_thread())
        told.set()

    writes.start_report("step 1", report)
    assert told.wait(30)
    assert reporters[0].daemon
