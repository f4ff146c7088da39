import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api import env
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.of_run import options_of_run
from trainsync.storage.objects.requests import bandwidth
from trainsync.storage.objects.requests.bandwidth import LEAST, Bandwidth

from tests.unit.storage.objects.memory import memory

MIB = 1 << 20


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@given(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=20))
def test_parts_go_as_fast_as_they_may_and_no_faster(sizes: list[int]) -> None:
    clock = Clock()
    bound = Bandwidth(LEAST, lambda: clock.now, clock.sleep)
    sent = 0
    for part in bound.paced(bytes(size) for size in sizes):
        assert clock.now == pytest.approx(100.0 + sent / LEAST)
        sent += len(part)


def test_time_in_which_nothing_goes_is_not_saved_up() -> None:
    clock = Clock()
    bound = Bandwidth(LEAST, lambda: clock.now, clock.sleep)
    list(bound.paced(iter([bytes(MIB)])))
    clock.now += 50.0
    list(bound.paced(iter([bytes(MIB)] * 3)))
    assert clock.now == pytest.approx(152.0)


def test_uploads_of_two_buckets_are_paced_by_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    bound = Bandwidth(LEAST, lambda: clock.now, clock.sleep)
    asked: list[tuple[str, int]] = []

    def of_process(store: str, rate: int) -> Bandwidth:
        asked.append((store, rate))
        return bound

    monkeypatch.setattr(bandwidth, "of_process", of_process)
    limits = Limits(part_bytes=5 * MIB, upload_bytes_per_second=LEAST)
    buckets = [ObjectBucket(memory()._store, "memory://", limits) for _ in range(2)]

    def blocks() -> Iterator[bytes]:
        yield from [bytes(MIB)] * 12

    threads = [
        threading.Thread(target=each.upload, args=(f"o{number}", blocks(), 12 * MIB))
        for number, each in enumerate(buckets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [("memory://", LEAST)] * 2
    # Six parts, of which the last to go has 2 or 5 MiB.
    assert clock.now >= 100.0 + 24 - 5
    assert [each.size(f"o{number}") for number, each in enumerate(buckets)] == [12 * MIB] * 2


def test_a_process_has_one_bound_for_a_store() -> None:
    one = bandwidth.of_process("s3://a/b", LEAST)
    assert bandwidth.of_process("s3://a/b", LEAST) is one
    assert bandwidth.of_process("s3://a/c", LEAST) is not one


def test_uploads_that_begin_at_once_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would have the whole of it otherwise: the first uploads of a process do so."""
    begin = threading.Barrier(2)

    def made(bytes_per_second: int) -> Bandwidth:
        with contextlib.suppress(threading.BrokenBarrierError):
            begin.wait(0.5)  # another thread that makes one, too
        return Bandwidth(bytes_per_second)

    monkeypatch.setattr(bandwidth, "Bandwidth", made)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(bandwidth.of_process, "s3://a/new", LEAST) for _ in range(2)]
        one, other = (each.result(30) for each in asked)
    assert one is other


def test_the_environment_of_a_run_bounds_its_uploads() -> None:
    assert options_of_run({}).limits.upload_bytes_per_second == 0
    options = options_of_run({env.STORE_UPLOAD_BYTES_PER_SECOND: "200Mi"})
    assert options.limits.upload_bytes_per_second == 200 * MIB


@pytest.mark.parametrize("text", ["much", "0", "1023Ki", "-1"])
def test_a_bound_that_is_none_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(StoreUrlError, match=f"BYTES_PER_SECOND is '{text}'; expected a quantity"):
        options_of_run({env.STORE_UPLOAD_BYTES_PER_SECOND: text})
