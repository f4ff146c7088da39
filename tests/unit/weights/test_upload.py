"""`Uploader`: a store that is full for a moment is waited for, and no longer than that."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from trainsync.weights import upload
from trainsync.weights.errors import StoreFullError
from trainsync.weights.upload import Uploader

ROOM_SECONDS = 0.4


class FakeConnection:
    """The Synchronizer: takes every part, and has made no room."""

    def call(self, method: str, *arguments: Any, **options: Any) -> bool:
        return method == "set_model_state_dict"


class FakeStore:
    """Ray's object store; ``attempt`` is called with the number of every attempt to put."""

    def __init__(self, attempt: Callable[[int], None]) -> None:
        self._attempt = attempt
        self.attempts = 0

    def put(self, arrays: Any) -> object:
        self.attempts += 1
        self._attempt(self.attempts)
        return object()


def uploader(monkeypatch: pytest.MonkeyPatch, attempt: Callable[[int], None]) -> Uploader:
    """One that puts every tensor into a bucket of its own."""
    monkeypatch.setattr(upload, "_ROOM_SECONDS", ROOM_SECONDS)
    monkeypatch.setattr(upload, "node_id", lambda: "here")  # there is no Ray
    one = Uploader(0, 1, bucket_bytes=1)
    monkeypatch.setattr(one, "_objects", FakeStore(attempt))
    monkeypatch.setattr(one, "_connected", lambda synchronizer, timeout: FakeConnection())
    return one


def full() -> None:
    raise ray.exceptions.ObjectStoreFullError("full")


STATE = {name: torch.ones(4) for name in ("a", "b")}


def test_a_later_bucket_of_a_long_upload_is_waited_for_as_long_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attempt(number: int) -> None:
        if number == 1:
            time.sleep(1.5 * ROOM_SECONDS)
        elif number == 2:
            full()

    assert uploader(monkeypatch, attempt).upload(STATE, None, 1).published


def test_a_store_that_stays_full_is_not_waited_for_any_longer_than_the_call_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "_RETRY_SECONDS", 0.001)
    one = uploader(monkeypatch, lambda number: full())
    monkeypatch.setattr(upload, "_ROOM_SECONDS", 60.0)
    started = time.monotonic()
    with pytest.raises(StoreFullError, match="version 1, rank 0"):
        one.upload(STATE, None, 1, timeout=0.05)
    assert time.monotonic() - started < 30.0
