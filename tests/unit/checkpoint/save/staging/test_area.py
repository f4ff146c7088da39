"""`StagingBuffers`: how many saves may be staged, and that memory is reused."""

import threading
from pathlib import Path

import pytest
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.checkpoint.save.staging.area import SlotKey, StagingBuffers

from tests.waiting import eventually


def key(step: int) -> SlotKey:
    return SlotKey("checkpoint", step)


def test_components_of_one_save_share_a_slot() -> None:
    buffers = StagingBuffers(slots=1)
    assert buffers.acquire(key(1), timeout=0) == buffers.acquire(key(1), timeout=0)


def test_a_third_save_waits_until_one_is_written() -> None:
    buffers = StagingBuffers(slots=2)
    first = buffers.acquire(key(1), timeout=0)
    buffers.acquire(key(2), timeout=0)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(buffers.acquire(key(3), timeout=30)))
    thread.start()
    eventually(lambda: buffers.waits == 1, 10)
    assert got == []
    buffers.release(first)
    thread.join(30)
    assert got == [first]
    assert buffers.wait_seconds > 0


def test_a_slot_is_free_only_when_every_component_gave_it_back() -> None:
    buffers = StagingBuffers(slots=1)
    slot = buffers.acquire(key(1), timeout=0)
    buffers.acquire(key(1), timeout=0)
    buffers.release(slot)
    with pytest.raises(
        SaveTimeoutError, match=r"checkpoint of step 2 .*still being written: .*step 1"
    ):
        buffers.acquire(key(2), timeout=0.01)
    buffers.release(slot)
    assert buffers.acquire(key(2), timeout=0) == slot


def test_the_same_memory_comes_back_for_the_same_component() -> None:
    buffers = StagingBuffers(slots=2)
    pointers = set()
    for step in range(5):
        slot = buffers.acquire(key(step), timeout=0)
        pointers.add(buffers.buffer(slot, "model", 1000, pinned=False).data_ptr())
        buffers.release(slot)
    assert len(pointers) == 1


def test_components_have_memory_of_their_own() -> None:
    buffers = StagingBuffers(slots=1)
    slot = buffers.acquire(key(1), timeout=0)
    model = buffers.buffer(slot, "model", 64, pinned=False)
    optim = buffers.buffer(slot, "optim", 64, pinned=False)
    assert model.data_ptr() != optim.data_ptr()


def test_memory_grows_with_the_shard() -> None:
    buffers = StagingBuffers(slots=1)
    slot = buffers.acquire(key(1), timeout=0)
    buffers.buffer(slot, "model", 10, pinned=False)
    assert buffers.buffer(slot, "model", 4096, pinned=False).numel() >= 4096


def test_giving_back_twice_is_an_error() -> None:
    buffers = StagingBuffers(slots=1)
    slot = buffers.acquire(key(1), timeout=0)
    buffers.release(slot)
    with pytest.raises(ValueError, match="not in use"):
        buffers.release(slot)


def test_a_forked_process_has_no_copy_of_what_is_staged() -> None:
    """It would cost its memory, and the next save a copy of every page."""
    buffers = StagingBuffers(slots=1)
    size = 4 << 20
    memory = buffers.buffer(buffers.acquire(key(1), timeout=0), "model", size, pinned=False)
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        first, _, last = line.partition(" ")[0].partition("-")
        if last and int(first, 16) <= memory.data_ptr() < int(last, 16):
            break
    flags = next(line for line in lines if line.startswith("VmFlags:"))
    assert "wf" in flags.split()  # wiped on fork; see proc_pid_smaps(5)
