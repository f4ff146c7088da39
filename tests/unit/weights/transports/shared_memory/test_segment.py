"""A segment with a reader is never written to; the kernel's locks ensure this."""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.transports.shared_memory.segment import (
    SHARED_MEMORY,
    SegmentGoneError,
    SharedSegment,
    check_room,
)
from trainsync.weights.transports.shared_memory.segment_reader import SegmentReader


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as name:
        yield Path(name)


def map_segment(path: Path, size: int) -> torch.Tensor:
    """By a process that has mapped nothing before."""
    return SegmentReader().map(path, size)


def written(folder: Path, value: int, size: int = 100_000) -> SharedSegment:
    segment = SharedSegment(folder / str(value), size)
    segment.data.fill_(value)
    segment.unlock()
    return segment


def test_what_is_written_is_read_without_a_copy(folder: Path) -> None:
    segment = written(folder, 7)
    data = map_segment(segment.path, segment.size)
    assert data.shape == (100_000,)
    assert bool((data == 7).all())
    segment.data[5] = 9  # against the rules: to see that it is the same memory
    assert data[5] == 9


def test_it_is_not_written_while_any_view_of_it_lives(folder: Path) -> None:
    segment = written(folder, 7)
    data = map_segment(segment.path, segment.size)
    view = data[64:128].view(torch.float32).view(4, 4)
    assert not segment.lock()
    del data
    assert not segment.lock(), "a view is left"
    del view
    assert segment.lock()


def test_it_is_not_mapped_while_its_owner_has_it_locked(folder: Path) -> None:
    segment = SharedSegment(folder / "1", 100)
    with pytest.raises(SegmentGoneError, match="1 is locked by its owner"):
        map_segment(segment.path, 100)
    segment.unlock()
    map_segment(segment.path, 100)


def test_readers_beside_one_another_all_count(folder: Path) -> None:
    segment = written(folder, 7)
    readers = [map_segment(segment.path, segment.size) for _ in range(3)]
    while readers:
        assert not segment.lock()
        readers.pop()
    assert segment.lock()


def test_a_removed_one_is_still_read(folder: Path) -> None:
    segment = written(folder, 7)
    data = map_segment(segment.path, segment.size)
    segment.remove()
    assert list(folder.iterdir()) == []
    assert bool((data == 7).all())


@pytest.mark.parametrize("size", [0, 1])
def test_next_to_nothing_is_a_segment_too(folder: Path, size: int) -> None:
    segment = SharedSegment(folder / "1", size)
    segment.unlock()
    assert map_segment(segment.path, size).shape == (size,)


def test_a_lack_of_memory_is_an_error_that_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match="1 cannot have 10 bytes: No space left on device"):
        SharedSegment(folder / "1", 10)
    assert list(folder.iterdir()) == []


def test_its_pages_are_mapped_without_pythons_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, given = mmap.mmap, []

    def mapped(file: int, size: int, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
        given.append(flags)
        return genuine(file, size, flags=flags)

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", mapped)
        segment = SharedSegment(folder / "1", 32 << 20)
    assert given == [mmap.MAP_SHARED], "MAP_POPULATE holds the lock meanwhile"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    segment.data.fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < segment.size // mmap.PAGESIZE // 8


def test_a_kernel_that_cannot_map_all_pages_at_once_does_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.EINVAL)
    segment = written(folder, 7)
    assert bool((map_segment(segment.path, segment.size) == 7).all())


def test_a_lack_of_memory_for_mapping_pages_is_an_error_that_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.ENOMEM)
    with pytest.raises(SharedMemoryError, match="cannot have 10 bytes: Cannot allocate memory"):
        SharedSegment(folder / "1", 10)
    assert list(folder.iterdir()) == []


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the kernel refuse to map pages."""

    def madvise(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    libc = SimpleNamespace(madvise=madvise)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)


def test_more_than_is_left_is_refused_without_taking_any(folder: Path) -> None:
    found = os.statvfs(folder)
    if found.f_blocks == 0:
        pytest.skip("this memory file system has no limit")
    with pytest.raises(SharedMemoryError, match=r"has no room for \d+ bytes .* have reserved\)"):
        check_room(folder, found.f_blocks * found.f_frsize + 1)
    check_room(folder, 1)


@pytest.mark.parametrize("linked", [False, True])
def test_what_a_file_without_a_name_may_still_take_is_not_free(
    linked: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = folder
    if linked:  # from another file system, as from /dev/shm to /run/shm
        asked = tmp_path / "shm"
        asked.symlink_to(folder)
        is_mount = Path.is_mount
        monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path or is_mount(path))

    def with_free(size: int) -> None:
        found = SimpleNamespace(f_frsize=1, f_blocks=2**50, f_bavail=size)
        monkeypatch.setattr(os, "statvfs", lambda _: found)

    with tempfile.TemporaryFile(dir=folder) as store:  # as Ray makes its own
        os.truncate(store.fileno(), 64 << 20)
        with_free(64 << 20)
        with pytest.raises(
            SharedMemoryError, match=r"\(0 of \d+ are free, besides \d+ that others"
        ):
            check_room(asked, 1)
        with_free(2**49)
        check_room(asked, 1)


def test_what_is_there_already_is_left_alone(folder: Path) -> None:
    segment = written(folder, 7)
    with pytest.raises(SharedMemoryError, match="cannot be made: File exists"):
        SharedSegment(segment.path, 10)
    assert bool((map_segment(segment.path, segment.size) == 7).all())


def test_one_that_is_too_short_or_gone_is_refused(folder: Path) -> None:
    segment = written(folder, 7, size=10)
    with pytest.raises(SharedMemoryError, match="has 10 bytes, expected 11"):
        map_segment(segment.path, 11)
    assert segment.lock(), "the refused one holds it"
    with pytest.raises(SharedMemoryError, match="cannot be read: No such file"):
        map_segment(folder / "2", 10)


def test_a_name_that_is_taken_away_while_it_is_opened_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = written(folder, 7)
    old, genuine, inode = segment.path, fcntl.flock, segment.path.stat().st_ino

    def stopped(file: Any, how: int) -> None:
        # A sweeper, or the end of another test's segment, may lock other files meanwhile.
        if os.fstat(file if isinstance(file, int) else file.fileno()).st_ino == inode:
            monkeypatch.undo()
            segment.rename(folder / "8")
        return genuine(file, how)

    monkeypatch.setattr(fcntl, "flock", stopped)
    with pytest.raises(SegmentGoneError, match="7 is gone"):
        map_segment(old, segment.size)
    assert segment.lock(), "the refused one holds it"


def test_no_other_user_may_open_a_segment(folder: Path) -> None:
    assert (written(folder, 7).path.stat().st_mode & 0o777) == 0o600
