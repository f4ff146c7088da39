"""Leases of readers, the lock between readers and retention, and the registry of watchers."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from trainsync.storage import atomic, leases, locks
from trainsync.storage.errors import (
    LeaseLostError,
    LockTimeoutError,
    StepGoneError,
    UnsafePathError,
)
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import HeldLease, LeaseBook, ReaderLease, reading
from trainsync.storage.saves import manifest, retention

from tests.unit.monitor.saves import CHECKPOINT, STATE_DICT
from tests.unit.storage.test_commit_files import commit
from tests.waiting import eventually


class Times:
    """A monotonic and a wall clock that the test advances."""

    def __init__(self) -> None:
        self.monotonic, self.wall = 100.0, time.time()

    def go(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    commit(directory, 5)
    return directory


def book(run: RunDirectory, times: Times) -> LeaseBook:
    return LeaseBook(run, lambda: times.wall)


def test_a_step_is_held_while_the_body_runs_and_no_longer(run: RunDirectory) -> None:
    watcher = LeaseBook(run)
    with reading(run, CHECKPOINT, 5, "merge") as lease:
        assert lease.committed == manifest.read_manifest(run, CHECKPOINT, 5)
        assert watcher.steps(0.0) == {5}
        (held,) = watcher.in_force(0.0)
        assert held.holder.startswith("merge-")
    assert watcher.steps(0.0) == set()
    assert list(run.leases.iterdir()) == []


def test_two_readers_of_one_name_do_not_end_each_others_lease(run: RunDirectory) -> None:
    with reading(run, CHECKPOINT, 5, "merge"):
        with reading(run, CHECKPOINT, 5, "merge"):
            pass
        assert LeaseBook(run).steps(0.0) == {5}


@pytest.mark.parametrize(("kind", "step"), [(CHECKPOINT, 6), (STATE_DICT, 5)])
def test_a_reader_that_is_too_late_gets_an_error_and_leaves_no_file(
    run: RunDirectory, kind: leases.SaveKind, step: int
) -> None:
    with (
        pytest.raises(StepGoneError, match=rf"{kind} {step} is not committed in .*newer step"),
        reading(run, kind, step, "load"),
    ):
        pytest.fail("the body ran")
    assert list(run.leases.iterdir()) == []


@pytest.mark.parametrize("holder", ["", "a/b", "..", "x" * 65, "a b"])
def test_a_holder_that_cannot_be_in_a_files_name_is_refused(run: RunDirectory, holder: str) -> None:
    with pytest.raises(UnsafePathError, match="cannot name a lease"):
        ReaderLease(run, CHECKPOINT, 5, holder)


def test_an_error_of_the_body_comes_out_as_it_is(run: RunDirectory) -> None:
    with pytest.raises(KeyError), reading(run, CHECKPOINT, 5, "load"):
        raise KeyError
    assert list(run.leases.iterdir()) == []


def test_retention_leaves_a_leased_step(run: RunDirectory) -> None:
    watcher = LeaseBook(run)
    with reading(run, CHECKPOINT, 5, "load"):
        assert not retention.remove_unleased(run, 5, lambda: watcher.steps(0.0))
    assert retention.remove_unleased(run, 5, lambda: watcher.steps(0.0))
    assert run.steps() == []


def test_without_a_working_lock_a_step_whose_lease_came_amid_the_rename_is_put_back(
    run: RunDirectory,
) -> None:
    looks = iter([set(), {5}])
    assert not retention.remove_unleased(run, 5, lambda: next(looks))
    assert run.steps() == [5]
    assert manifest.read_manifest(run, CHECKPOINT, 5)


def test_a_reader_and_retention_never_both_win(run: RunDirectory) -> None:
    def remove(watcher: LeaseBook, step: int) -> None:
        with leases.lock(run, 10, "test"):
            retention.remove_unleased(run, step, lambda: watcher.steps(0.0))

    for step in range(10, 40):
        commit(run, step)
        thread = threading.Thread(target=remove, args=(LeaseBook(run), step))
        thread.start()
        try:
            with reading(run, CHECKPOINT, step, "load"):
                thread.join()
                assert run.step(step).exists(), "it went from under its reader"
        except StepGoneError:
            thread.join()
            assert not run.step(step).exists()


def test_a_lease_is_renewed_while_it_is_held(run: RunDirectory) -> None:
    with reading(run, CHECKPOINT, 5, "load", ttl_seconds=0.2) as lease:
        before = lease.path.stat().st_ino, lease.path.stat().st_mtime_ns
        eventually(lambda: (lease.path.stat().st_ino, lease.path.stat().st_mtime_ns) != before)


def test_a_lease_that_was_lost_is_an_error_at_the_end(run: RunDirectory) -> None:
    with (
        pytest.raises(LeaseLostError, match=r"checkpoint 5 .* was lost while it was read"),
        reading(run, CHECKPOINT, 5, "load"),
    ):
        retention.remove_step(run, 5)


def test_a_step_that_was_replaced_meanwhile_is_an_error_at_the_end(run: RunDirectory) -> None:
    with (
        pytest.raises(LeaseLostError, match="replaced by another save"),
        reading(run, CHECKPOINT, 5, "load"),
    ):
        commit(run, 5, data=b"other")


def test_a_lease_that_was_removed_as_dead_is_taken_anew_if_the_step_is_there(
    run: RunDirectory,
) -> None:
    lease = ReaderLease(run, CHECKPOINT, 5, "load")
    lease.path.unlink()
    lease.renew()
    lease.check()
    assert LeaseBook(run).steps(0.0) == {5}
    lease.path.unlink()
    retention.remove_step(run, 5)
    lease.renew()
    with pytest.raises(LeaseLostError, match="not committed"):
        lease.check()
    assert list(run.leases.iterdir()) == []


# The watcher.


def test_a_lease_ends_one_ttl_after_its_last_renewal_by_the_watchers_clock(
    run: RunDirectory,
) -> None:
    times = Times()
    watcher = book(run, times)
    lease = ReaderLease(run, CHECKPOINT, 5, "load", ttl_seconds=60)
    assert watcher.steps(times.monotonic) == {5}
    times.go(59)
    lease.renew()
    assert watcher.steps(times.monotonic) == {5}
    times.go(59)
    assert watcher.steps(times.monotonic) == {5}
    assert watcher.remove_expired(times.monotonic) == []
    times.go(2)
    assert watcher.steps(times.monotonic) == set()
    assert watcher.remove_expired(times.monotonic) == [lease.path.name]
    assert not lease.path.exists()


def test_a_jump_of_the_wall_clock_ends_no_lease_that_is_known(run: RunDirectory) -> None:
    times = Times()
    watcher = book(run, times)
    ReaderLease(run, CHECKPOINT, 5, "load")
    assert watcher.steps(times.monotonic) == {5}
    times.wall += 10 * leases.LONGEST_TTL_SECONDS
    assert watcher.steps(times.monotonic) == {5}


def test_a_watcher_that_starts_anew_counts_every_lease_from_its_start(run: RunDirectory) -> None:
    times = Times()
    ReaderLease(run, CHECKPOINT, 5, "load", ttl_seconds=60)
    times.go(50)
    again = book(run, times)
    assert again.steps(times.monotonic) == {5}
    times.go(50)
    assert again.steps(times.monotonic) == {5}
    times.go(11)
    assert again.steps(times.monotonic) == set()


def test_what_a_crash_left_long_ago_holds_nothing(run: RunDirectory) -> None:
    times = Times()
    lease = ReaderLease(run, CHECKPOINT, 5, "load")
    old = times.wall - leases.LONGEST_TTL_SECONDS - 1
    os.utime(lease.path, (old, old))
    watcher = book(run, times)
    assert watcher.steps(times.monotonic) == set()
    assert watcher.remove_expired(times.monotonic) == [lease.path.name]


@pytest.mark.parametrize("text", ["", "{", '{"ttlSeconds": 1e12}', "\0" * 10])
def test_a_damaged_lease_holds_its_step_for_a_while_and_then_goes(
    run: RunDirectory, text: str
) -> None:
    times = Times()
    watcher = book(run, times)
    path = run.leases / "checkpoint-5-x.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    future = times.wall + 1e9
    os.utime(path, (future, future))
    assert watcher.in_force(times.monotonic) == [HeldLease(CHECKPOINT, 5, "x")]
    times.go(leases.DEFAULT_TTL_SECONDS + 1)
    assert watcher.steps(times.monotonic) == set()
    assert watcher.remove_expired(times.monotonic) == [path.name]


def test_what_was_half_written_goes_after_an_hour(run: RunDirectory) -> None:
    times = Times()
    watcher = book(run, times)
    run.leases.mkdir(parents=True)
    half = atomic.temporary_name(run.leases / "checkpoint-5-x.json")
    half.write_text("{")
    watcher.remove_expired(times.monotonic)
    assert half.exists(), "its holder may be writing it now"
    times.go(leases.LONGEST_TTL_SECONDS + 1)
    watcher.remove_expired(times.monotonic)
    assert not half.exists()


def test_other_files_among_the_leases_are_left_alone(run: RunDirectory) -> None:
    run.leases.mkdir(parents=True)
    (run.leases / "README").write_text("hello")
    watcher = LeaseBook(run)
    assert watcher.in_force(0.0) == []
    assert watcher.remove_expired(1e9) == []


# The lock.


def test_a_timeout_for_the_lock_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "x" / "a.lock"
    with locks.exclusive(path, 1, "the first one") as first:
        assert first.held
        with (
            pytest.raises(LockTimeoutError, match=r"held by the first one: not free within 0\.05"),
            locks.exclusive(path, 0.05),
        ):
            pytest.fail("held twice")
    with locks.exclusive(path, 0):
        pass


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom trainsync.storage import locks\n"
        "with locks.exclusive(Path(sys.argv[1]), 1, 'child'):\n"
        "    print('held', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(LockTimeoutError, match="child"), locks.exclusive(path, 0.05):
            pass
        child.kill()
        with locks.exclusive(path, 10) as lock:
            assert lock.held


def test_a_volume_without_locks_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locks.exclusive(tmp_path / "a.lock", 1) as lock:
        assert not lock.held
