"""Threads behind the trainer, when the system has none left."""

import threading
from collections.abc import Callable

import pytest
from trainsync.checkpoint.save.background import BackgroundWrites

NO_THREAD = RuntimeError("can't start new thread")


def test_a_save_that_no_thread_was_found_for_is_not_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes, queued, written = BackgroundWrites(lambda _: True), [], []

    def refuse(run: Callable[..., None], *arguments: object) -> None:
        queued.append(lambda: run(*arguments))
        raise NO_THREAD

    monkeypatch.setattr(writes._workers, "submit", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        writes.start("model", "step 1", write=lambda: written.append(1), tell=lambda: None)
    queued[0]()
    assert written == []
    assert writes.wait(0) == []


def test_a_save_that_a_worker_took_although_no_thread_was_left_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes, written, told = BackgroundWrites(lambda _: True), [], threading.Event()

    def take(run: Callable[..., None], *arguments: object) -> None:
        run(*arguments)
        raise NO_THREAD

    monkeypatch.setattr(writes._workers, "submit", take)
    writes.start("model", "step 1", write=lambda: written.append(1), tell=told.set)
    assert written == [1]
    assert told.wait(30)
    assert writes.wait(0) == []


def test_a_process_that_ends_does_not_wait_for_a_monitor_that_is_away() -> None:
    writes, tellers, told = BackgroundWrites(lambda _: True), [], threading.Event()

    def tell() -> None:
        tellers.append(threading.current_thread())
        told.set()

    writes.start("model", "step 1", write=lambda: None, tell=tell)
    assert told.wait(30)
    assert tellers[0].daemon
