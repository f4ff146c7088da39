"""The volume refuses writes or cannot be listed."""

import errno
import os
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import SaveState
from trainsync.api.status import ConditionStatus
from trainsync.monitor import errors
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import pointers

from tests.unit.monitor.core.cores import Disk, Start, commit, fail, healthy, pointer
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, Clock, directory, request, write_all


def test_a_commit_that_the_volume_refuses_is_tried_again(
    start: Start, tmp_path: Path, clock: Clock, disk: Disk
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    disk.fail("MANIFEST", 2)
    for _ in range(3):
        core.tick()
        clock.go(10)
    assert disk.failed == 2
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED


def test_a_clock_that_is_set_back_delays_neither_a_retry_nor_the_pointer(
    start: Start, tmp_path: Path, clock: Clock, disk: Disk
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    disk.fail("MANIFEST", 1)
    core.tick()
    clock.go(-86400)
    disk.fail("latest_", 1)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED
    assert disk.failed == 1
    clock.go(-86400)
    core.tick()
    assert pointers.read_pointer(RunDirectory(tmp_path), CHECKPOINT) == 10


def test_a_commit_that_the_volume_keeps_refusing_is_aborted_and_leaves_nothing(
    start: Start, tmp_path: Path, clock: Clock, disk: Disk
) -> None:
    core = start(io_tries=3)
    commit(core, tmp_path, 5)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    disk.fail("MANIFEST", 10**6)
    for _ in range(5):
        core.tick()
        clock.go(10)
    status = core.saves.save_status(FIRST, CHECKPOINT, 10)
    assert status.state is SaveState.ABORTED
    assert "commit failed 3 times" in str(status.error)
    assert "No space left" in str(status.error)
    assert RunDirectory(tmp_path).steps() == [5]
    disk.fail("", 0)
    commit(core, tmp_path, 11)


def test_an_abort_that_cannot_be_written_is_known_at_once_and_written_later(
    start: Start, tmp_path: Path, clock: Clock, disk: Disk
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    disk.fail("ABORTED", 2)
    fail(core, 10)
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.ABORTED
    clock.go(6)
    core.tick()
    clock.go(6)
    core.tick()
    assert directory(tmp_path, FIRST, 10).aborted.exists()


@pytest.mark.parametrize("refused", [1, 3])
def test_an_abort_that_the_volume_refuses_leaves_nothing_half_promoted_in_the_end(
    start: Start, tmp_path: Path, clock: Clock, disk: Disk, refused: int
) -> None:
    refusals = []

    def phase(name: str) -> None:
        if name == "aborting" and len(refusals) < refused:
            refusals.append(name)
            raise OSError(errno.EIO, "Input/output error")

    failpoints.enable(failpoints.COMMIT, phase)
    core = start(io_tries=1)
    commit(core, tmp_path, 5)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    disk.fail("MANIFEST", 1)  # all files are promoted by then
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.ABORTED
    for _ in range(refused):
        clock.go(6)
        core.tick()
    assert len(refusals) == refused
    assert not RunDirectory(tmp_path).step(10).exists()
    assert directory(tmp_path, FIRST, 10).aborted.exists()
    assert core.view().checkpoint.last_error is not None
    commit(core, tmp_path, 11)


def test_a_pointer_that_cannot_be_written_is_written_later_and_health_says_so(
    start: Start, tmp_path: Path, clock: Clock, disk: Disk
) -> None:
    core = start()
    commit(core, tmp_path, 5)
    disk.fail("latest_checkpointed", 1)
    commit(core, tmp_path, 10)
    assert pointer(tmp_path) == 5
    assert healthy(core)[0] is ConditionStatus.FALSE
    clock.go(6)
    core.tick()
    assert pointer(tmp_path) == 10
    assert healthy(core)[0] is ConditionStatus.TRUE


def test_a_registration_that_cannot_be_written_is_refused_and_can_be_repeated(
    start: Start, disk: Disk
) -> None:
    core = start()
    disk.fail("REGISTRATION", 1)
    with pytest.raises(errors.StorageUnavailableError, match="No space left"):
        core.saves.register(FIRST, request(10))
    assert core.saves.register(FIRST, request(10)).state is SaveState.REGISTERED


def test_a_claim_that_cannot_be_written_is_not_granted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(claim=None)

    def refuse(_path: Path, _data: bytes) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_exclusive", refuse)
        with pytest.raises(errors.StorageUnavailableError, match="Input/output error"):
            core.claim(FIRST, "main", None)
        with pytest.raises(errors.FencedError):
            core.saves.register(FIRST, request(10))
    core.claim(FIRST, "main", None)


def test_a_claim_waits_for_a_complete_save_that_the_volume_refuses(
    start: Start, tmp_path: Path, clock: Clock, disk: Disk
) -> None:
    core = start(io_tries=3)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    disk.fail("MANIFEST", 2)
    for _ in range(2):
        with pytest.raises(errors.StorageUnavailableError, match=r"checkpoint 10 .* ask again"):
            core.claim(SECOND, "main", None)
        clock.go(10)
    core.claim(SECOND, "main", None)
    point = core.resume(SECOND)
    assert point is not None
    assert point.step == 10


def test_a_claim_is_granted_when_the_volume_keeps_refusing_the_older_save(
    start: Start, tmp_path: Path, clock: Clock, disk: Disk
) -> None:
    core = start(io_tries=3)
    commit(core, tmp_path, 5)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    disk.fail("MANIFEST", 10**6)
    for _ in range(2):
        with pytest.raises(errors.StorageUnavailableError):
            core.claim(SECOND, "main", None)
        clock.go(10)
    core.claim(SECOND, "main", None)
    point = core.resume(SECOND)
    assert point is not None
    assert point.step == 5


def test_a_volume_that_cannot_be_listed_is_said_and_survived(
    start: Start, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)

    def refuse(_path: object = ".") -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        core.tick()
        assert "Input/output error" in healthy(core)[1]
    clock.go(31)
    core.tick()
    assert healthy(core)[0] is ConditionStatus.TRUE


def test_a_manifest_that_may_not_be_durable_is_gone_after_the_abort(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(io_tries=1)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    fsync = atomic.fsync_directory
    manifest_file = RunDirectory(tmp_path).manifest(CHECKPOINT, 10)
    failed = []

    def refuse_once(path: Path) -> None:
        if manifest_file.exists() and not failed:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        fsync(path)

    monkeypatch.setattr(atomic, "fsync_directory", refuse_once)
    core.tick()
    assert failed == [manifest_file.parent]
    for one in (core, start(claim=None)):
        one.tick()
        assert one.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.ABORTED
    assert RunDirectory(tmp_path).steps() == []
