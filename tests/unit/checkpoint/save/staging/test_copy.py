"""`copy_all`: every byte, once, nothing else, with any number of threads."""

import ctypes
import threading
from functools import partial

import numpy as np
import pytest
from trainsync.checkpoint.save.staging import copy as copying
from trainsync.checkpoint.save.staging.copy import Copy, copy_all

copy_in_blocks = partial(copy_all, block=64, worth_a_thread=64)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("sizes", [[], [0], [1], [100], [7, 0, 64, 1000, 3], [64] * 50])
def test_every_byte_arrives_and_nothing_beside_is_touched(threads: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(1, 255, sum(sizes) + 1, dtype=np.uint8)
    gap = 3
    target = np.zeros(sum(sizes) + gap * len(sizes) + 1, dtype=np.uint8)
    expected = target.copy()
    copies = []
    start, place = 0, 0
    for size in sizes:
        copies.append(Copy(target.ctypes.data + place, source.ctypes.data + start, size))
        expected[place : place + size] = source[start : start + size]
        start += size
        place += size + gap
    copy_in_blocks(copies, threads)
    assert np.array_equal(target, expected)


def test_large_tensors_are_copied_by_several_threads_bit_for_bit() -> None:
    source = np.random.default_rng(1).integers(0, 255, 50_000_001, dtype=np.uint8)
    target = np.zeros_like(source)
    copy_all([Copy(target.ctypes.data, source.ctypes.data, source.size)], 4)
    assert np.array_equal(target, source)


def test_helpers_that_never_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    late = []
    monkeypatch.setattr(copying._HELPERS, "submit", late.append)
    source = np.random.default_rng(1).integers(0, 255, 10_000, dtype=np.uint8)
    target = np.zeros_like(source)
    copy_in_blocks([Copy(target.ctypes.data, source.ctypes.data, source.size)], 4)
    assert np.array_equal(target, source)
    assert len(late) == 3
    target[:] = 0
    for helper in late:  # runs when the buffers may have another owner
        helper()
    assert not target.any()


def test_without_a_thread_to_be_had_the_caller_copies_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying._HELPERS, "submit", refuse)
    source = np.random.default_rng(1).integers(0, 255, 10_000, dtype=np.uint8)
    target = np.zeros_like(source)
    copy_in_blocks([Copy(target.ctypes.data, source.ctypes.data, source.size)], 4)
    assert np.array_equal(target, source)


def test_after_an_interrupt_no_thread_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = threading.current_thread()
    helping, interrupted, returned = threading.Event(), threading.Event(), threading.Event()
    copied_late: list[bool] = []
    memmove = ctypes.memmove

    def interrupted_memmove(target: int, source: int, size: int) -> None:
        if threading.current_thread() is caller:
            assert helping.wait(30)
            interrupted.set()
            raise KeyboardInterrupt
        helping.set()
        assert interrupted.wait(30)
        copied_late.append(returned.wait(0.2))
        memmove(target, source, size)

    monkeypatch.setattr(copying.ctypes, "memmove", interrupted_memmove)
    source = np.ones(64 * 100, dtype=np.uint8)
    target = np.zeros_like(source)
    with pytest.raises(KeyboardInterrupt):
        copy_in_blocks([Copy(target.ctypes.data, source.ctypes.data, source.size)], 2)
    returned.set()
    assert copied_late == [False]
    assert target.sum() == 64
