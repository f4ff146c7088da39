"""Objects are deleted though some are gone, as in GCS, which deletes each by a request."""

import threading
from typing import Any

import pytest
from obstore.store import MemoryStore
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.errors import StoreRefusedError

KEYS = [f"o/{number}" for number in range(20)]


class OneByOne:
    """A store whose deletion of many ends at an object that is gone; deletions wait for another."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.together = threading.Barrier(2)
        self.refused: set[str] = set()

    def delete(self, paths: Any) -> None:
        if not isinstance(paths, str):
            raise FileNotFoundError("status: 404: <Code>NoSuchKey</Code>")
        if paths in self.refused:
            raise PermissionError("status: 403: <Code>AccessDenied</Code>")
        self.together.wait(10)
        self.inner.delete(paths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def filled() -> tuple[OneByOne, ObjectBucket]:
    store: Any = OneByOne()
    bucket = ObjectBucket(store, "gs://bucket", Limits())
    for key in KEYS:
        bucket.create(key, b"x")
    return store, bucket


def test_where_one_is_gone_the_others_are_deleted_several_at_once() -> None:
    _, bucket = filled()
    bucket.delete(KEYS)
    assert bucket.below("o") == []


def test_a_deletion_that_is_refused_is_told_of() -> None:
    store, bucket = filled()
    store.refused = set(KEYS)
    with pytest.raises(StoreRefusedError, match="access is denied"):
        bucket.delete(KEYS)
    assert len(bucket.below("o")) == len(KEYS)
