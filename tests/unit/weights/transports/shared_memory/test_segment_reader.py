"""A mapping outlives the version in it, the lock does not: a read segment is never written to."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync.weights.transports.shared_memory.segment import (
    SHARED_MEMORY,
    SegmentGoneError,
    SharedSegment,
)
from trainsync.weights.transports.shared_memory.segment_reader import SegmentReader

SIZE = 100_000


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as name:
        yield Path(name)


@pytest.fixture
def segment(folder: Path) -> Iterator[SharedSegment]:
    segment = SharedSegment(folder / "1", SIZE)
    segment.data.fill_(1)
    segment.unlock()
    yield segment
    segment.remove()


def mapped(path: Path) -> int:
    """How often this process has the segment mapped, under whatever name."""
    inode = str(path.stat().st_ino)
    return mapped_inodes().count(inode)


def mapped_inodes() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()]


def renew(segment: SharedSegment, name: int) -> None:
    """As the trainer does for the next version."""
    assert segment.lock()
    segment.rename(segment.path.with_name(str(name)))
    segment.data.fill_(name)
    segment.unlock()


def test_versions_in_one_segment_are_read_through_one_mapping(segment: SharedSegment) -> None:
    reader = SegmentReader()
    before = mapped(segment.path)
    for number in range(2, 6):
        renew(segment, number)
        data = reader.map(segment.path, SIZE)
        assert bool((data == number).all())
        assert mapped(segment.path) == before + 1
        assert not segment.lock(), "it is written to while it is read"
        del data
    assert segment.lock()


def test_the_lock_stays_until_the_last_view_though_the_mapping_is_known(
    segment: SharedSegment,
) -> None:
    reader = SegmentReader()
    del_later = reader.map(segment.path, SIZE)
    view = del_later[64:128].view(torch.float32)
    again = reader.map(segment.path, SIZE)  # of the very version that is viewed
    del del_later, view
    assert not segment.lock(), "the second one still reads"
    del again
    assert segment.lock()


def test_a_segment_that_was_removed_keeps_no_memory(segment: SharedSegment) -> None:
    reader = SegmentReader()
    inode = segment.path.stat().st_ino
    data = reader.map(segment.path, SIZE)
    segment.remove()
    reader.forget_removed()
    assert bool((data == 1).all()), "what is viewed stays"
    del data
    assert str(inode) not in mapped_inodes()


def test_a_stale_name_of_a_known_mapping_is_refused_and_locks_nothing(
    segment: SharedSegment,
) -> None:
    reader = SegmentReader()
    old = segment.path
    del_now = reader.map(old, SIZE)
    del del_now
    renew(segment, 2)
    with pytest.raises(SegmentGoneError):
        reader.map(old, SIZE)
    assert segment.lock()


def test_what_a_child_may_read_too_is_locked_until_it_ends(segment: SharedSegment) -> None:
    reader = SegmentReader()
    data = reader.map(segment.path, SIZE)
    reading, ending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ending)
        os.read(reading, 1)  # until the parent has looked
        os._exit(0 if data.numpy().tobytes() == b"\x01" * SIZE else 1)  # no threads of torch here
    os.close(reading)
    try:
        del data
        assert not segment.lock(), "the child reads it"
    finally:
        os.close(ending)
        _, status = os.waitpid(child, 0)
    assert status == 0
    reader.map(segment.path, SIZE)  # a mapping of its own: the former one goes
    assert segment.lock()
