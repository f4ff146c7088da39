"""Read errors, a lost Lease and a killed monitor set no whole checkpoint aside."""

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api.spec import Verify
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.digest import file_digest
from trainsync.storage.inspect import digests
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, quarantine

from tests.unit.monitor.fleet import CrashError
from tests.unit.monitor.resume.resuming import (
    Seen,
    Start,
    flip,
    is_alive,
    is_committed,
    message,
    pointer,
    report,
    resume,
    settle,
    step_of,
    train,
)
from tests.unit.monitor.saves import FIRST, SECOND
from tests.waiting import eventually


def test_a_volume_that_cannot_be_read_sets_nothing_aside(
    start: Start,
    tmp_path: Path,
    seen: Seen,
    seconds: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    core = start(SECOND, Verify.DIGEST)
    for number in (errno.EIO, errno.ESTALE):

        def refuse(path: Path, _: object, number: int = number) -> str:
            raise OSError(number, os.strerror(number), str(path))

        with monkeypatch.context() as patch:
            patch.setattr(digests, "file_digest", refuse)
            for _ in range(2):
                with pytest.raises(errors.StorageUnavailableError, match=os.strerror(number)):
                    resume(core, SECOND)
        assert (pointer(tmp_path), seen.steps) == (20, [])
        with pytest.raises(errors.StorageUnavailableError):
            core.resume(SECOND)
        seconds[0] += 61
    assert step_of(resume(core, SECOND)) == 20


def test_a_rank_with_a_bad_disk_sets_nothing_aside_and_is_not_read_for_without_end(
    start: Start, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    core = start(SECOND)
    tries: list[Path] = []

    def refuse(path: Path, _: object) -> str:
        tries.append(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(digests, "file_digest", refuse)
    report(core, SECOND, 20)
    for _ in range(5):
        settle(core)
    assert len(tries) == 2
    assert (pointer(tmp_path), seen.steps) == (20, [])
    assert os.strerror(errno.EIO) in message(core)


def test_what_differs_in_memory_alone_is_whole(
    start: Start, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    read: set[Path] = set()

    def differs_once(path: Path, on_block: Callable[[int], None]) -> str:
        found = file_digest(path, on_block) if path in read else "xxh3-128:" + 32 * "0"
        read.add(path)
        return found

    monkeypatch.setattr(digests, "file_digest", differs_once)
    assert step_of(resume(start(SECOND, Verify.DIGEST), SECOND)) == 20
    assert seen.steps == []
    assert read, "its files were read"


def test_a_monitor_that_lost_its_lease_while_it_read_sets_nothing_aside(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    held = [True]

    def gate() -> None:
        if not held[0]:
            raise errors.NotReadyError("the Lease is not held")

    core = start(SECOND, authority=Authority(gate=gate))
    report(core, SECOND, 20)
    core.tick()
    held[0] = False
    for _ in range(50):
        core.poll()
        time.sleep(0.005)
    assert (is_committed(tmp_path, 20), seen.steps) == (True, [])
    held[0] = True
    settle(core)
    assert (is_committed(tmp_path, 20), seen.steps) == (False, [20])


def test_a_monitor_killed_anywhere_while_it_sets_aside_is_finished_by_the_next(
    start: Start, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise CrashError

    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    owners = [SaveOwner(number, f"eeeeeeee{number}") for number in range(1, 5)]
    for owner, where in zip(
        owners,
        [
            (manifest, "set_aside"),
            (manifest.atomic, "fsync_directory"),
            (quarantine, "remove_request"),
        ],
        strict=False,
    ):
        core = start(owner)
        if is_committed(tmp_path, 20):
            report(core, owner, 20)
        with monkeypatch.context() as patch:
            core.tick()
            eventually(lambda core=core: not is_alive(core))  # type: ignore[misc]
            patch.setattr(*where, kill)
            with contextlib.suppress(CrashError):
                core.poll()
    assert not is_committed(tmp_path, 20)
    core = start(owners[-1])
    assert step_of(resume(core, owners[-1])) == 10
    assert pointer(tmp_path) == 10
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []
