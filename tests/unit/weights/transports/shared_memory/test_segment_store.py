"""Two segments in turn, proof of one memory, and nothing left of trainers that died."""

import errno
import os
import signal
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.synchronizer.connection import RenewalTimer, renew_until
from trainsync.weights.transports.shared_memory import segment_store
from trainsync.weights.transports.shared_memory.segment import (
    SHARED_MEMORY,
    Room,
    SegmentGoneError,
    SharedSegment,
)
from trainsync.weights.transports.shared_memory.segment_reader import SegmentReader
from trainsync.weights.transports.shared_memory.segment_store import (
    SegmentStore,
    Sweeper,
    read_probe,
    remove_leftovers,
    segment_path,
)

SIZE = 1000


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as name:
        yield Path(name)


@pytest.fixture
def store(parent: Path) -> Iterator[SegmentStore]:
    store = SegmentStore(parent, attempt=3)
    yield store
    store.close()


def send(store: SegmentStore, value: int, size: int = SIZE) -> tuple[SharedSegment, str]:
    segment = store.acquire(size)
    name = store.share(segment)
    segment.data.fill_(value)
    store.publish(segment)
    return segment, name


def read(parent: Path, name: str) -> torch.Tensor:
    return SegmentReader().map(segment_path(parent, name), SIZE)


def open_in(parent: Path) -> int:
    """How many files and folders of ``parent`` this process has open."""
    count = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            count += file.readlink().is_relative_to(parent)
    return count


def test_two_segments_change_places_when_readers_follow(parent: Path, store: SegmentStore) -> None:
    first, name = send(store, 1)
    reader = read(parent, name)
    second, name = send(store, 2)
    assert second is not first
    reader = read(parent, name)
    for value in range(3, 9):
        segment, name = send(store, value)
        assert segment is (first if value % 2 else second)
        reader = read(parent, name)
        assert bool((reader == value).all())


def test_what_a_reader_keeps_is_never_written_to_and_goes_with_it(
    parent: Path, store: SegmentStore
) -> None:
    first, name = send(store, 1)
    kept = read(parent, name)
    send(store, 2)
    for value in range(3, 9):
        segment, name = send(store, value)
        assert segment is not first
    assert bool((kept == 1).all())
    assert not first.path.exists(), "its memory would never be free"
    assert len(list((parent / store.name).iterdir())) == 2  # one, and the probe


def test_the_name_of_an_older_version_is_refused_while_its_memory_is_written_again(
    parent: Path, store: SegmentStore
) -> None:
    first, late = send(store, 1)
    send(store, 2, size=SIZE)
    segment = store.acquire(SIZE)
    name = store.share(segment)
    assert segment is first
    with pytest.raises(SegmentGoneError):
        read(parent, late)  # it was stopped when it heard of the first version
    assert read(parent, name).numel() == SIZE


def test_a_segment_that_was_not_published_is_acquired_again(store: SegmentStore) -> None:
    segment = store.acquire(SIZE)
    assert store.acquire(SIZE) is segment


def test_a_segment_that_somebody_has_mapped_is_not_written_to_again(
    parent: Path, store: SegmentStore
) -> None:
    segment = store.acquire(SIZE)
    mapped = read(parent, store.share(segment))  # and the pass failed
    assert store.acquire(SIZE) is not segment
    assert mapped.numel() == SIZE


def test_another_size_gets_another_segment(parent: Path, store: SegmentStore) -> None:
    first, name = send(store, 1)
    kept = read(parent, name)
    segment, _ = send(store, 2, size=2 * SIZE)
    assert segment.size == 2 * SIZE
    send(store, 3, size=2 * SIZE)
    assert bool((kept == 1).all())
    assert not first.path.exists()


def test_what_nobody_serves_any_more_is_written_to_instead_of_new_memory(
    parent: Path, store: SegmentStore
) -> None:
    first, _ = send(store, 1)
    assert send(store, 2)[0] is first
    assert send(store, 3, size=2 * SIZE)[0] is not first
    assert not first.path.exists()


def test_room_for_two_versions_is_asked_for_before_the_first_is_laid(
    parent: Path, store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(segment_store, "check_room", lambda _, size: asked.append(size))
    _, name = send(store, 1)
    reader = read(parent, name)
    send(store, 2)
    assert asked == [2 * SIZE, SIZE]
    assert bool((reader == 1).all())


def test_what_versions_may_still_take_is_no_room_beside_them(
    parent: Path, store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(total=100 * SIZE, free=10 * SIZE, reserved=0)
    monkeypatch.setattr(segment_store, "room_of", lambda _: room)
    assert store.room_beside(SIZE) == 8 * SIZE
    _, name = send(store, 1)
    reader = read(parent, name)
    assert store.room_beside(SIZE) == 9 * SIZE
    send(store, 2)
    assert store.room_beside(SIZE) == 10 * SIZE, "the first one's memory is written again"
    assert store.room_beside(2 * SIZE) == 8 * SIZE
    monkeypatch.setattr(segment_store, "room_of", lambda _: None)
    assert store.room_beside(SIZE) > 1 << 60
    del reader


def test_only_what_was_acquired_last_is_published(store: SegmentStore) -> None:
    segment, _ = send(store, 1)
    with pytest.raises(ValueError, match="was not acquired last"):
        store.publish(segment)


def test_who_sees_the_same_memory_can_prove_it(parent: Path, store: SegmentStore) -> None:
    assert store.proves(read_probe(parent, store.name))


@pytest.mark.parametrize("answer", [None, "", "0" * 32, "ü", 7])
def test_a_guess_proves_nothing(store: SegmentStore, answer: object) -> None:
    assert not store.proves(answer)


def test_other_memory_has_no_probe(parent: Path, store: SegmentStore) -> None:
    assert read_probe(parent / "elsewhere", store.name) is None


@pytest.mark.parametrize("name", ["", "..", "../etc", "trainsync-weights-0-/etc/passwd"])
def test_only_a_stores_names_are_looked_at(parent: Path, name: str) -> None:
    assert read_probe(parent, name) is None
    with pytest.raises(SharedMemoryError, match="is not the name of a segment"):
        segment_path(parent, name)


@pytest.mark.parametrize("number", ["", "probe", "1/2", "../1", "-1"])
def test_only_a_segment_of_a_store_has_a_path(store: SegmentStore, number: str) -> None:
    with pytest.raises(SharedMemoryError, match="is not the name of a segment"):
        segment_path(Path("/"), f"{store.name}/{number}")


def test_closing_leaves_nothing_but_what_is_read(parent: Path) -> None:
    store = SegmentStore(parent, attempt=0)
    _, name = send(store, 1)
    data = read(parent, name)
    store.close()
    assert list(parent.iterdir()) == []
    assert bool((data == 1).all())


def test_what_a_killed_trainer_left_is_removed_by_the_next_one(parent: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it ends whatever becomes of the test
        send(SegmentStore(parent, attempt=0), 1)
        os.write(writing, b"!")
        signal.pause()
    os.read(reading, 1)
    remove_leftovers(parent)
    (folder,) = parent.iterdir()  # it lives, so this is left alone
    data = read(parent, f"{folder.name}/1")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = SegmentStore(parent, attempt=1)
    assert [path.name for path in parent.iterdir()] == [store.name]
    assert bool((data == 1).all()), "an explorer still serves it"
    store.close()


def test_what_a_killed_trainer_left_is_removed_by_any_process_of_the_run(parent: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it ends whatever becomes of the test
        send(SegmentStore(parent, attempt=0), 1)
        os.write(writing, b"!")
        signal.pause()
    os.read(reading, 1)
    os.kill(child, signal.SIGSTOP)
    Sweeper(parent, every=0, age=0).sweep()
    (folder,) = parent.iterdir()  # it may go on
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    Sweeper(parent, every=0, age=60).sweep()
    assert folder.exists(), "it is too young: one that is just made is not locked yet"
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        Sweeper(parent, every=0, age=0).sweep()
        assert folder.exists(), "it is another user's"
        os.chown(folder, 0, 0)
    pulse, nobody = RenewalTimer(), weakref.ref(RenewalTimer())
    renew_until(nobody, pulse, 0.01, Sweeper(parent, every=0, age=0).sweep)  # of an explorer
    assert list(parent.iterdir()) == []


def test_what_is_not_ours_is_left_alone(parent: Path) -> None:
    (parent / "trainsync-weights-of-mine").mkdir()
    (parent / "trainsync-weights-0-0123456789abcdef").write_text("a file")
    remove_leftovers(parent)
    assert len(list(parent.iterdir())) == 2


def test_a_full_file_system_is_an_error_that_leaves_neither_folder_nor_open_file(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def full(*_: object) -> None:
        opened.append(open_in(parent))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SharedMemoryError, match="cannot be used: No space left"):
        SegmentStore(parent, attempt=0)
    assert list(parent.iterdir()) == []
    assert opened == [1]
    assert open_in(parent) == 0


def test_a_file_system_that_cannot_be_written_to_is_an_error(parent: Path) -> None:
    with pytest.raises(SharedMemoryError, match="cannot be used: No such file"):
        SegmentStore(parent / "none", attempt=0)
