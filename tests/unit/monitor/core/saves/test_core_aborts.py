"""A save is aborted after a failure, for wrong files or receipts, and at its deadline."""

from pathlib import Path

import pytest
from trainsync.api.protocol import SaveState
from trainsync.api.spec import Verify
from trainsync.api.status import ConditionStatus
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import FileEntry

from tests.unit.monitor.core.cores import Start, commit, fail, healthy, pointer
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    Clock,
    content,
    directory,
    receipt,
    request,
    stage,
    write,
    write_all,
)


def test_a_failed_participant_aborts_the_save_with_its_cause(start: Start, tmp_path: Path) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.saves.register(FIRST, request(20))
    write_all(tmp_path, FIRST, 20)
    fail(core, 20)
    status = core.saves.save_status(FIRST, CHECKPOINT, 20)
    assert (status.state, status.error) == (SaveState.ABORTED, "model.1: OSError: boom")
    core.tick()
    assert pointer(tmp_path) == 10
    assert RunDirectory(tmp_path).steps() == [10]
    assert healthy(core) == (
        ConditionStatus.FALSE,
        "checkpoint 20 of attempt 0: model.1: OSError: boom",
    )
    commit(core, tmp_path, 30)
    assert healthy(core)[0] is ConditionStatus.TRUE


def test_a_failure_on_disk_alone_aborts_too(start: Start, tmp_path: Path) -> None:
    core = start()
    core.saves.register(FIRST, request(20))
    receipts.write_failure(
        directory(tmp_path, FIRST, 20),
        receipts.ParticipantFailure(
            kind=CHECKPOINT, step=20, attempt=0, incarnation=FIRST.incarnation,
            component="model", rank=0, error="no space",
        ),
    )  # fmt: skip
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 20).error == "model.0: no space"


def damage(root: Path, how: str) -> None:
    save = directory(root, FIRST, 10)
    file = save.files / "actor/checkpoint_rank_0.pt"
    path = save.receipt("model", 0)
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "flipped":
        file.write_bytes(b"!" + file.read_bytes()[1:])
    elif how == "link":
        target = file.rename(root / "stolen")
        file.symlink_to(target)
    elif how == "torn receipt":
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "outside":
        entry = FileEntry("../../../x", 1, "xxh3-128:" + "0" * 32)
        receipts.write_receipt(save, receipt(FIRST, 10, 0, CHECKPOINT, entry))
    elif how == "other attempt":
        moved = receipt(SECOND, 10, 0, CHECKPOINT)
        receipts.write_receipt(save, moved)
    elif how == "stranger":
        entry = stage(root, FIRST, 10, 7)
        receipts.write_receipt(save, receipt(FIRST, 10, 7, CHECKPOINT, entry))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "is missing"),
        ("short", "bytes, expected"),
        ("flipped", "has digest"),
        ("link", "symbolic link"),
        ("torn receipt", "model.0.json"),
        ("outside", "plain relative path"),
        ("other attempt", "speaks of another save"),
        ("stranger", "model.7 wrote a receipt but is not among"),
    ],
)
def test_a_save_whose_files_or_receipts_are_wrong_is_aborted_with_the_cause(
    start: Start, tmp_path: Path, how: str, said: str
) -> None:
    core = start(verify=Verify.DIGEST)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    damage(tmp_path, how)
    core.tick()
    status = core.saves.save_status(FIRST, CHECKPOINT, 10)
    assert status.state is SaveState.ABORTED
    assert said in str(status.error)
    assert RunDirectory(tmp_path).steps() == []
    assert pointer(tmp_path) is None
    assert not (tmp_path.parent / "x").exists()
    commit(core, tmp_path, 11)
    assert healthy(core)[0] is ConditionStatus.TRUE


@pytest.mark.parametrize("verify", Verify)
def test_no_file_of_an_older_save_is_taken_for_one_that_went_with_the_machine(
    start: Start, tmp_path: Path, verify: Verify
) -> None:
    """Names in staging are not durable: a crash of the machine may take one, and not its receipt.

    And at the step may lie what a checkpoint left that was set aside: same name, same size.
    """
    core = start(verify=verify)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    damage(tmp_path, "missing")
    older = RunDirectory(tmp_path).step(10) / "actor/checkpoint_rank_0.pt"
    atomic.make_directory(older.parent)
    older.write_bytes(content(FIRST, CHECKPOINT, 10, 0).swapcase())
    core.tick()
    status = core.saves.save_status(FIRST, CHECKPOINT, 10)
    assert status.state is SaveState.ABORTED
    assert f"{older} has digest" in str(status.error)
    assert pointer(tmp_path) is None
    commit(core, tmp_path, 11)


@pytest.mark.parametrize(
    ("verify", "how"),
    [
        *((verify, how) for verify in Verify for how in ("short", "missing", "link")),
        (Verify.DIGEST, "flipped"),  # a check by size cannot find a flipped bit
    ],
)
def test_a_file_that_changes_after_it_was_checked_is_never_committed(
    start: Start, tmp_path: Path, verify: Verify, how: str
) -> None:
    core = start(verify=verify)
    core.saves.register(FIRST, request(10))
    write(tmp_path, FIRST, 10, 0)
    core.tick()  # rank 0 is checked, and good
    damage(tmp_path, how)
    write(tmp_path, FIRST, 10, 1)
    core.tick()
    status = core.saves.save_status(FIRST, CHECKPOINT, 10)
    assert status.state is SaveState.ABORTED
    assert "checkpoint_rank_0.pt" in str(status.error)
    assert RunDirectory(tmp_path).steps() == []
    assert pointer(tmp_path) is None


def test_a_save_that_stays_incomplete_is_aborted_at_its_deadline(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    core = start(save_deadline_seconds=60.0)
    core.saves.register(FIRST, request(10))
    write(tmp_path, FIRST, 10, 0)
    clock.go(59)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.REGISTERED
    clock.go(2)
    core.tick()
    assert "no receipt of model.1 within 60 s" in str(
        core.saves.save_status(FIRST, CHECKPOINT, 10).error
    )


def test_what_late_writers_leave_after_an_abort_is_removed(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    fail(core, 10)
    write_all(tmp_path, FIRST, 10)
    clock.go(31)
    core.tick()
    assert not directory(tmp_path, FIRST, 10).files.exists()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.ABORTED
