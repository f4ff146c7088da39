"""After a store was found away, calls fail at once for a while."""

from collections.abc import Callable
from typing import Any

import pytest
from obstore.store import MemoryStore
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.requests.breaker import Breaker

from tests.waiting import eventually

AWAY = StoreUnavailableError("it is away")


def test_the_pause_doubles_with_each_failure_and_ends_with_a_success() -> None:
    now = 0.0
    breaker = Breaker(2.0, lambda: now)
    breaker.check()
    for pause in (2, 4, 8, 15, 15):
        breaker.failed(AWAY)
        breaker.failed(StoreUnavailableError("of a call that was under way"))
        now += pause - 0.1
        with pytest.raises(StoreUnavailableError, match="it is away"):
            breaker.check()
        now += 0.2
        breaker.check()
    breaker.failed(AWAY)
    breaker.succeeded()
    breaker.check()
    breaker.failed(AWAY)
    now += 2.1
    breaker.check()


class Away:
    """obstore's store, which may be away; counts what is asked of it."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.is_away = True
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            self.asked += 1
            if self.is_away:
                raise OSError("Connection refused: ConnectionRefused")
            return getattr(self._store, name)(*given, **more)

        return call


def answers(bucket: ObjectBucket) -> bool:
    try:
        return bucket.find("x") is None
    except StoreUnavailableError:
        return False


def test_a_bucket_with_a_pause_asks_a_store_that_is_away_now_and_then() -> None:
    store = Away()
    limits = Limits(retry_seconds=0.0, pause_seconds=0.3)
    bucket = ObjectBucket(store, "s3://b", limits)  # type: ignore[arg-type]
    calls: list[Callable[[], object]] = [
        lambda: bucket.get("x"),
        lambda: bucket.create("x", b"x"),
        lambda: bucket.below(""),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailableError, match="reading x: the connection was refused"):
            call()
    assert store.asked == 1
    store.is_away = False
    eventually(lambda: answers(bucket))
    bucket.create("x", b"x")
    assert bucket.get("x").data == b"x"


def test_an_answer_that_is_an_error_ends_the_pause() -> None:
    store = Away()
    limits = Limits(retry_seconds=0.0, pause_seconds=0.3)
    bucket = ObjectBucket(store, "s3://b", limits)  # type: ignore[arg-type]
    for _ in range(3):
        store.is_away = True
        with pytest.raises(StoreUnavailableError):
            bucket.get("x")
        store.is_away = False
        eventually(lambda: answers(bucket))
        asked = store.asked
        assert bucket.find("y") is None
        assert store.asked == asked + 1
