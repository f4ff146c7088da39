import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.storage.copying.copy import checked
from trainsync.storage.errors import FileCheckError
from trainsync.storage.objects.requests import transfer
from trainsync.storage.parallel import for_each

from tests.unit.storage.objects.memory import manifest_of


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 30))
def test_parts_are_of_one_size_and_lose_nothing(blocks: list[bytes], part: int) -> None:
    found = list(transfer.parts(iter(blocks), part, []))
    assert b"".join(found) == b"".join(blocks)
    assert all(len(one) == part for one in found[:-1])
    assert all(0 < len(one) <= part for one in found)


def test_a_block_that_is_a_part_already_is_not_copied() -> None:
    blocks = [bytearray(b"abcd"), bytearray(b"efgh"), bytearray(b"i")]
    found = list(transfer.parts(iter(blocks), 4, []))
    assert [one is block for one, block in zip(found, blocks, strict=True)] == [True, True, False]
    assert b"".join(found) == b"abcdefghi"


@given(st.integers(1, 2000), st.integers(1, 100), st.integers(1, 5))
def test_ranges_come_in_order_and_few_at_a_time(size: int, part: int, at_once: int) -> None:
    data = bytes(number % 251 for number in range(size))
    lock, now, most = threading.Lock(), 0, 0

    def fetch(start: int, end: int) -> bytes:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        with lock:
            now -= 1
        return data[start:end]

    assert b"".join(transfer.in_order(size, part, at_once, fetch)) == data
    assert most <= at_once


def test_a_range_that_fails_is_raised_in_its_place() -> None:
    def fetch(start: int, end: int) -> bytes:
        if start == 20:
            raise OSError("mine")
        return b"x" * (end - start)

    seen = transfer.in_order(50, 10, 3, fetch)
    assert [next(seen), next(seen)] == [b"x" * 10] * 2
    with pytest.raises(OSError, match="mine"):
        next(seen)


@pytest.mark.parametrize(("size", "expected"), [(1, 8), (8 * 9000, 8), (8 * 9000 + 1, 9)])
def test_there_are_never_too_many_parts(size: int, expected: int) -> None:
    assert transfer.part_bytes(size, 8) == expected


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([b"da", b"ta"], None),
        ([b"da", b"to"], "has digest"),
        ([b"dat"], "has 3 bytes, expected 4"),
        ([b"data", b"!"], "has more than 4 bytes"),
        ([], "has 0 bytes"),
    ],
)
def test_bytes_are_compared_on_their_way(blocks: list[bytes], why: str | None) -> None:
    entry = manifest_of(1, b"data").files[0]
    if why is None:
        assert list(checked(iter(blocks), entry)) == blocks
        return
    with pytest.raises(FileCheckError, match=why):
        list(checked(iter(blocks), entry))


def test_the_first_failure_stops_all_threads() -> None:
    stopped = threading.Event()
    begun = threading.Event()

    def endless() -> Iterator[None]:
        begun.set()
        while True:
            yield

    def work(item: int, go_on: object) -> None:
        assert callable(go_on)
        if item == 0:
            begun.wait(10)
            raise ValueError("mine")
        try:
            for _ in endless():
                go_on()
        finally:
            stopped.set()

    with pytest.raises(ValueError, match="mine"):
        for_each([0, 1], work, threads=2)
    assert stopped.is_set()
