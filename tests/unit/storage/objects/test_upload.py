"""An object that is made while it goes to the store: whole, or not there."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live.upload import Upload
from trainsync.storage.objects.requests import transfer

from tests.unit.storage.objects.memory import memory
from tests.waiting import eventually

PART = 5 << 20


def small_parts() -> ObjectBucket:
    bucket = memory()
    bucket.limits = replace(bucket.limits, part_bytes=PART)
    return bucket


@given(st.sampled_from([0, 1, PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 7]))
def test_what_was_written_is_there_after_finish(size: int) -> None:
    bucket, data = small_parts(), memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    upload = Upload(bucket, "key", size)
    for start in range(0, size, 3 << 20):
        upload.write(data[start : start + (3 << 20)])
    upload.finish()
    assert b"".join(bucket.blocks("key", size)) == data


def test_parts_are_handed_over_as_they_are_and_never_written_again() -> None:
    bucket, seen = small_parts(), []

    def take(key: str, blocks: Iterator[Any], size: int, *, estimated: bool = False) -> None:
        seen.extend(transfer.parts(blocks, PART, []))

    bucket.upload = take  # type: ignore[method-assign]
    upload = Upload(bucket, "key", 3 * PART)
    for byte in range(3):
        upload.write(memoryview(bytes([byte]) * PART))
    upload.finish()
    assert [set(part) for part in seen] == [{0}, {1}, {2}]
    assert all(isinstance(part, bytearray) for part in seen)  # a copy would be bytes


@pytest.mark.parametrize("size", [1, 2 * PART + 1])
def test_of_an_object_that_is_given_up_nothing_is_there(size: int) -> None:
    bucket = small_parts()
    upload = Upload(bucket, "key", size)
    upload.write(memoryview(bytes(size)))
    upload.abandon()
    assert bucket.below("") == []
    assert not [t for t in threading.enumerate() if t.name == "trainsync-upload"]


def test_what_the_store_refuses_is_raised_in_the_writer_which_does_not_hang() -> None:
    bucket = small_parts()

    def refuse(key: str, blocks: Iterator[Any], size: int, *, estimated: bool = False) -> None:
        raise StoreUnavailableError("it is away")

    bucket.upload = refuse  # type: ignore[method-assign]
    upload = Upload(bucket, "key", 100 * PART)
    with pytest.raises(StoreUnavailableError, match="it is away"):
        for _ in range(100):
            upload.write(memoryview(bytes(PART)))
    upload.abandon()


class Slow:
    """In place of a bucket's `upload`: takes a part, and the next once it ``may`` go."""

    def __init__(self) -> None:
        self.taken = 0
        self.may = threading.Event()

    def upload(
        self, key: str, blocks: Iterator[Any], size: int, *, estimated: bool = False
    ) -> None:
        for _ in blocks:
            self.taken += 1
            assert self.may.wait(30)


def test_parts_that_wait_do_not_go_to_the_store_once_the_object_is_given_up() -> None:
    bucket, slow = small_parts(), Slow()
    bucket.upload = slow.upload  # type: ignore[method-assign]
    upload = Upload(bucket, "key", 9 * PART)
    upload.write(memoryview(bytes(PART)))
    eventually(lambda: slow.taken == 1)
    upload.write(memoryview(bytes(2 * PART)))
    giving_up = threading.Thread(target=upload.abandon)
    giving_up.start()
    try:
        eventually(lambda: upload._queue.qsize() == 1, 5)  # what tells the store's thread of it
    finally:
        slow.may.set()
        giving_up.join(30)
    assert slow.taken == 1


def test_a_writer_that_waits_for_the_store_hears_that_the_object_is_not_wanted() -> None:
    bucket, slow, asked = small_parts(), Slow(), list[int]()
    bucket.upload = slow.upload  # type: ignore[method-assign]

    def check() -> None:
        asked.append(slow.taken)
        if len(asked) > 4:  # one part is on its way, two wait
            raise LookupError("not wanted")

    upload = Upload(bucket, "key", 9 * PART, check)
    try:
        with pytest.raises(LookupError, match="not wanted"):
            upload.write(memoryview(bytes(9 * PART)))
        assert slow.taken == 1
    finally:
        slow.may.set()
        upload.abandon()
