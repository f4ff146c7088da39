"""What other runs left in memory goes when they are over, and only then."""

import os
import time
from pathlib import Path

import pytest
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.memory.sweep import IDLE_SECONDS, forget_later, hold, sweep


@pytest.fixture
def own(tmp_path: Path) -> MemoryPlace:
    place = MemoryPlace.of_run(tmp_path, 1, "own", tmp_path)
    place.make()
    return place


@pytest.fixture
def other(tmp_path: Path) -> MemoryPlace:
    place = MemoryPlace.of_run(tmp_path, 1, "other", tmp_path)
    place.make()
    return place


def age(place: MemoryPlace) -> None:
    then = time.time() - IDLE_SECONDS - 60
    os.utime(place.directory / "alive", (then, then))
    os.utime(place.directory, (then, then))


def test_a_run_that_nothing_has_used_for_an_hour_goes(own: MemoryPlace, other: MemoryPlace) -> None:
    os.close(hold(other))
    age(other)
    sweep(own)
    assert not other.directory.exists()
    assert own.directory.exists()


def test_a_run_that_may_be_started_again_stays(own: MemoryPlace, other: MemoryPlace) -> None:
    os.close(hold(other))
    sweep(own)
    assert other.directory.exists()


def test_a_run_that_is_alive_stays_however_long_it_saves_nothing(
    own: MemoryPlace, other: MemoryPlace
) -> None:
    fd = hold(other)
    age(other)
    sweep(own)
    assert other.directory.exists()
    os.close(fd)
    sweep(own)
    assert not other.directory.exists()


def test_two_processes_hold_one_run(own: MemoryPlace) -> None:
    first, second = hold(own), hold(own)
    os.close(first)
    os.close(second)


def test_what_is_no_run_of_ours_is_left_alone(own: MemoryPlace, tmp_path: Path) -> None:
    stray = own.directory.parent / "stray"
    stray.mkdir()
    link = own.directory.parent / "link"
    link.symlink_to(tmp_path)
    sweep(own, idle_seconds=-1)
    assert stray.exists()
    assert link.exists()


def test_what_a_run_of_the_same_name_kept_before_it_was_deleted_does_not_stay(
    own: MemoryPlace,
) -> None:
    def kept(attempt: int) -> Path:
        path = own.directory / f"5-{attempt}-0123456789abcdef-model-0-{'0' * 32}"
        path.touch()
        return path

    now, earlier, later = kept(3), kept(0), kept(4)
    then = time.time() - IDLE_SECONDS - 60
    for path in (earlier, later):
        os.utime(path, (then, then))
    forget_later(own, 0)
    assert now.exists()  # maybe of an attempt that runs
    assert earlier.exists()
    assert not later.exists()
