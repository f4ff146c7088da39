"""`Uploader`: a store that is full for a moment is waited for, and no longer than that."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from trainsync.weights.errors import StoreFullError
from trainsync.weights.transports.object_store import store, upload
from trainsync.weights.transports.object_store.store import StoreObjects
from trainsync.weights.transports.object_store.upload import Uploader

ROOM_SECONDS = 0.4


class FakeConnection:
    """The Synchronizer: takes every part, and has made no room."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, *arguments: Any, **options: Any) -> bool:
        self.calls.append((method, *arguments))
        return method == "set_model_state_dict"


class FakeStore:
    """Ray's object store; ``attempt`` is called with the number of every attempt to put."""

    def __init__(self, attempt: Callable[[int], None]) -> None:
        self._attempt = attempt
        self.attempts = 0

    def put(self, arrays: Any, version: int) -> object:
        self.attempts += 1
        self._attempt(self.attempts)
        return object()


def uploader(
    monkeypatch: pytest.MonkeyPatch, attempt: Callable[[int], None], room: float = ROOM_SECONDS
) -> Uploader:
    """One that puts every tensor into a bucket of its own."""
    monkeypatch.setattr(upload, "node_id", lambda: "here")  # there is no Ray
    one = Uploader(0, 1, bucket_bytes=1, room=room)
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
    one = uploader(monkeypatch, lambda number: full(), room=60.0)
    started = time.monotonic()
    with pytest.raises(StoreFullError, match="version 1, rank 0"):
        one.upload(STATE, None, 1, timeout=0.05)
    assert time.monotonic() - started < 30.0


def test_a_part_says_how_long_its_upload_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(number: int) -> None:
        time.sleep(0.05)

    one, connection = uploader(monkeypatch, attempt), FakeConnection()
    monkeypatch.setattr(one, "_connected", lambda synchronizer, timeout: connection)
    sent = one.upload(STATE, None, 1)
    (method, _, version, _, seconds) = connection.calls[-1]
    assert (method, version) == ("set_model_state_dict", 1)
    assert 0.1 <= seconds <= sent.seconds


def test_only_objects_of_the_newest_version_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: dict[bytes, Callable[[bytes], None]] = {}

    class Reference:
        def __init__(self) -> None:
            self._identity = bytes([len(gone)])

        def binary(self) -> bytes:
            return self._identity

    def watch(reference: Reference, tell: Callable[[bytes], None]) -> bool:
        gone[reference.binary()] = tell
        return True

    worker = SimpleNamespace(core_worker=SimpleNamespace(add_object_out_of_scope_callback=watch))
    private = SimpleNamespace(worker=SimpleNamespace(global_worker=worker))
    fake = SimpleNamespace(put=lambda arrays: Reference(), _private=private)
    monkeypatch.setattr(store, "ray", fake)

    objects = StoreObjects()
    held, first, second = (objects.put([], version).binary() for version in (1, 2, 2))
    assert held != first
    assert not objects.wait_deleted(0.0)
    gone[first](first)
    assert not objects.wait_deleted(0.0), "another object of the version is still there"
    gone[second](second)
    assert objects.wait_deleted(0.0), "somebody holds version 1, which has had its time"
    gone[held](held)
    assert objects.wait_deleted(0.0)
