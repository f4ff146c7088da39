import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from trainsync import failpoints
from trainsync.api.base import Model
from trainsync.api.protocol import (
    ExplorerReport,
    FailureReport,
    Participant,
    ProgressReport,
    ReceiptHint,
    SaveKind,
    SaveRequest,
    SaveState,
    WeightsReport,
)
from trainsync.api.spec import Verify
from trainsync.api.status import ConditionStatus, ConditionType
from trainsync.monitor import errors
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.commit.cleanup import OUTCOMES_KEPT
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import Owner, SaveKey
from trainsync.storage import atomic
from trainsync.storage.layout import MAX_STEP, RunDirectory
from trainsync.storage.saves import manifest, pointers, receipts
from trainsync.storage.saves.receipts import FileEntry

from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    content,
    directory,
    receipt,
    request,
    stage,
    write,
    write_all,
)

Start = Callable[..., MonitorCore]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(tmp_path: Path, clock: Clock) -> Iterator[Start]:
    """Starts a core on the same directory, as a restarted monitor would."""

    def make(
        *, claim: Owner | None = FIRST, authority: Authority | None = None, **settings: object
    ) -> MonitorCore:
        core = MonitorCore(
            RunDirectory(tmp_path),
            CoreSettings(**settings),  # type: ignore[arg-type]
            clock=clock,
            authority=authority,
        )
        if claim is not None:
            core.claim(claim, "main", None)
        return core

    yield make


def commit(
    core: MonitorCore, root: Path, step: int, owner: Owner = FIRST, kind: SaveKind = CHECKPOINT
) -> None:
    core.saves.register(owner, request(step, kind))
    write_all(root, owner, step, kind)
    core.tick()
    status = core.saves.save_status(owner, kind, step)
    assert status.state is SaveState.COMMITTED, status


def pointer(root: Path, kind: SaveKind = CHECKPOINT) -> int | None:
    return pointers.read_pointer(RunDirectory(root), kind)


def healthy(core: MonitorCore) -> tuple[ConditionStatus, str]:
    for condition in core.view().conditions:
        if condition.type is ConditionType.CHECKPOINT_HEALTHY:
            return condition.status, condition.message
    raise AssertionError("no condition")


# Commit.


def test_nothing_is_committed_before_every_participant_has_its_receipt(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    write(tmp_path, FIRST, 10, 0)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.REGISTERED
    assert RunDirectory(tmp_path).steps() == []
    assert pointer(tmp_path) is None
    write(tmp_path, FIRST, 10, 1)
    core.tick()
    status = core.saves.save_status(FIRST, CHECKPOINT, 10)
    assert status.state is SaveState.COMMITTED
    committed = manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10)
    assert status.manifest_digest == committed.digest
    manifest.check_manifest(RunDirectory(tmp_path), committed.manifest, with_digest=True)
    assert pointer(tmp_path) == 10
    assert (tmp_path / "global_step_10/actor/checkpoint_rank_1.pt").read_bytes() == content(
        FIRST, CHECKPOINT, 10, 1
    )


def test_a_hint_commits_without_a_scan(start: Start, tmp_path: Path) -> None:
    core = start()
    core.saves.register(FIRST, request(10, ranks=1))
    who = Participant(component="model", rank=0)
    hint = ReceiptHint(kind=CHECKPOINT, step=10, participant=who)
    core.saves.receipt_hint(FIRST, hint)
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.REGISTERED
    write(tmp_path, FIRST, 10, 0)
    core.saves.receipt_hint(FIRST, hint)
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED


def test_receipts_may_come_before_the_registration(start: Start, tmp_path: Path) -> None:
    core = start()
    write_all(tmp_path, FIRST, 10)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.UNKNOWN
    assert core.saves.register(FIRST, request(10)).state is SaveState.COMMITTED


def test_staging_holds_only_the_outcome_after_the_end(start: Start, tmp_path: Path) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.saves.register(FIRST, request(11))
    write(tmp_path, FIRST, 11, 0)
    fail(core, 11)
    names = {
        step: sorted(p.name for p in directory(tmp_path, FIRST, step).path.iterdir())
        for step in (10, 11)
    }
    assert names == {
        10: ["COMMITTED.json", "REGISTRATION.json"],
        11: ["ABORTED.json", "REGISTRATION.json"],
    }
    assert list(RunDirectory(tmp_path).trash.iterdir()) == []


def test_a_late_older_save_commits_and_never_moves_the_pointer_back(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    write(tmp_path, FIRST, 10, 0)
    commit(core, tmp_path, 20)
    write(tmp_path, FIRST, 10, 1)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED
    assert pointer(tmp_path) == 20
    resumed = core.resume(FIRST)
    assert resumed is not None
    assert resumed.step == 20


def test_registering_again_is_answered_and_contradicting_is_refused(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    core.saves.register(FIRST, request(10))
    with pytest.raises(errors.InvalidRequestError, match="other participants"):
        core.saves.register(FIRST, request(10, ranks=3))
    twice = [Participant(component="model", rank=0)] * 2
    with pytest.raises(errors.InvalidRequestError, match="listed twice"):
        core.saves.register(FIRST, SaveRequest(kind=CHECKPOINT, step=11, participants=twice))
    write_all(tmp_path, FIRST, 10)
    core.tick()
    assert core.saves.register(FIRST, request(10)).state is SaveState.COMMITTED


def test_a_checkpoint_that_reuses_the_state_dict_lists_its_files_too(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    core.saves.register(FIRST, request(10, ranks=1, reuse=True))
    entry = stage(tmp_path, FIRST, 10, 0, path="actor/optim.pt")
    receipts.write_receipt(directory(tmp_path, FIRST, 10), receipt(FIRST, 10, 0, CHECKPOINT, entry))
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.REGISTERED
    commit(core, tmp_path, 10, kind=STATE_DICT)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED
    files = manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10).manifest.files
    assert [f.path for f in files] == [
        "actor/optim.pt",
        "actor/state_dict_rank_0.pt",
        "actor/state_dict_rank_1.pt",
    ]


def test_weights_of_an_attempt_that_ended_are_never_put_beside_another_ones_optimizer(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 5)
    commit(core, tmp_path, 10, kind=STATE_DICT)
    core.claim(SECOND, "main", None)
    # It resumed from 5 and trained 10 again, to other weights, but saves no state dict of its own.
    core.saves.register(SECOND, request(10, ranks=1, reuse=True))
    entry = stage(tmp_path, SECOND, 10, 0, path="actor/optim.pt")
    save = directory(tmp_path, SECOND, 10)
    receipts.write_receipt(save, receipt(SECOND, 10, 0, CHECKPOINT, entry))
    core.tick()
    status = core.saves.save_status(SECOND, CHECKPOINT, 10)
    assert status.state is SaveState.ABORTED
    assert "is of attempt 0" in (status.error or "")
    assert pointer(tmp_path) == 5


@pytest.mark.parametrize("message", [SaveRequest, ReceiptHint, FailureReport])
def test_a_step_that_has_no_directory_is_refused_at_the_door(message: type[Model]) -> None:
    who = {"component": "model", "rank": 0}
    said = {"kind": "checkpoint", "participants": [who], "participant": who, "error": "x"}
    fields = {name: value for name, value in said.items() if name in message.model_fields}
    message.model_validate({**fields, "step": MAX_STEP})
    with pytest.raises(ValidationError, match="step"):
        message.model_validate({**fields, "step": MAX_STEP + 1})


# Abort.


def fail(core: MonitorCore, step: int, error: str = "OSError: boom") -> None:
    who = Participant(component="model", rank=1)
    core.saves.failure(
        FIRST, FailureReport(kind=CHECKPOINT, step=step, participant=who, error=error)
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
        receipts.Failure(
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


# The volume fails.


class Disk:
    """Makes durable writes of files whose name contains ``name`` fail, ``times`` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.times, self.failed = "", 0, 0
        write_bytes = atomic.write_bytes

        def failing(path: Path, data: bytes, *more: Callable[[], None], **how: bool) -> None:
            if self.name and self.name in path.name and self.failed < self.times:
                self.failed += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            write_bytes(path, data, *more, **how)

        monkeypatch.setattr(atomic, "write_bytes", failing)

    def fail(self, name: str, times: int) -> None:
        self.name, self.times, self.failed = name, times, 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


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


def test_a_run_that_resumed_at_its_last_step_has_nothing_to_wait_for(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    commit(core, tmp_path, 20)
    core = start(claim=SECOND)
    assert core.saves.save_status(SECOND, CHECKPOINT, 20).state is SaveState.UNKNOWN
    point = core.resume(SECOND)
    assert point is not None
    core = start(claim=None)  # the monitor restarts
    status = core.saves.save_status(SECOND, CHECKPOINT, 20)
    assert (status.state, status.manifest_digest) == (SaveState.COMMITTED, point.manifest_digest)
    assert core.saves.save_status(SECOND, CHECKPOINT, 10).state is SaveState.UNKNOWN
    assert core.saves.save_status(SECOND, STATE_DICT, 20).state is SaveState.UNKNOWN
    client = DiskMonitorClient(tmp_path, attempt=SECOND.attempt, incarnation=SECOND.incarnation)
    assert client.save_status(CHECKPOINT, 20) == status


def test_a_committed_save_whose_record_was_forgotten_stays_as_it_is(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    for step in range(1, OUTCOMES_KEPT + 3):
        commit(core, tmp_path, step)
    key = SaveKey(FIRST, 1, CHECKPOINT)
    assert core._worker.ledger.find(key) is None
    before = manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 1)
    assert core.saves.save_status(FIRST, CHECKPOINT, 1).state is SaveState.COMMITTED
    fail(core, 1)
    core.tick()
    assert core.saves.register(FIRST, request(1)).state is SaveState.COMMITTED
    write_all(tmp_path, FIRST, 1)
    core.tick()
    assert manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 1) == before
    assert core.saves.save_status(FIRST, CHECKPOINT, 1).state is SaveState.COMMITTED


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


# Claims and fencing.


def test_an_attempt_is_granted_once(start: Start) -> None:
    core = start()
    core.claim(FIRST, "main", 0)
    with pytest.raises(errors.ClaimRefusedError, match="runs once per attempt"):
        core.claim(Owner(0, "zzzzzzzz"), "main", 0)
    core.claim(Owner(0, "zzzzzzzz"), "explorers", 0)


def test_an_attempt_newer_than_the_run_is_not_yet_granted(start: Start) -> None:
    core = start(claim=None)
    with pytest.raises(errors.NotYetError, match="attempt 1 is newer"):
        core.claim(SECOND, "main", 0)
    core.claim(SECOND, "main", 1)


def test_an_attempt_older_than_the_run_or_than_a_grant_is_refused(start: Start) -> None:
    core = start(claim=None)
    with pytest.raises(errors.ClaimRefusedError, match="the run is at attempt 1"):
        core.claim(FIRST, "main", 1)
    core.claim(SECOND, "main", 1)
    with pytest.raises(errors.ClaimRefusedError):
        core.claim(FIRST, "main", None)


def test_a_cluster_name_that_is_no_name_is_invalid(start: Start) -> None:
    with pytest.raises(errors.InvalidRequestError):
        start(claim=None).claim(FIRST, "../x", None)


def test_every_call_of_an_older_attempt_or_unknown_incarnation_is_fenced(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    core.claim(SECOND, "main", None)
    who = Participant(component="model", rank=0)
    weights = WeightsReport(trainer_version=1, method="memory")
    calls: list[Callable[[Owner], object]] = [
        lambda owner: core.saves.register(owner, request(10)),
        lambda owner: core.saves.receipt_hint(
            owner, ReceiptHint(kind=CHECKPOINT, step=10, participant=who)
        ),
        lambda owner: core.saves.failure(
            owner, FailureReport(kind=CHECKPOINT, step=10, participant=who, error="")
        ),
        lambda owner: core.saves.save_status(owner, CHECKPOINT, 10),
        lambda owner: core.resume(owner),
        lambda owner: core.report_progress(owner, ProgressReport(step=1)),
        lambda owner: core.report_weights(owner, weights),
    ]
    for owner in (FIRST, Owner(1, "zzzzzzzz"), Owner(2, "zzzzzzzz")):
        for call in calls:
            with pytest.raises(errors.FencedError):
                call(owner)
    assert core.view().progress is None
    for call in calls:
        call(SECOND)


def test_a_new_attempt_first_commits_what_the_old_one_completed(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.saves.register(FIRST, request(20))
    write_all(tmp_path, FIRST, 20)
    core.saves.register(FIRST, request(30))
    write(tmp_path, FIRST, 30, 0)
    core.claim(SECOND, "main", None)
    resumed = core.resume(SECOND)
    assert resumed is not None
    assert resumed.step == 20
    core.tick()
    assert not RunDirectory(tmp_path).owner(0, FIRST.incarnation).exists()
    assert RunDirectory(tmp_path).steps() == [10, 20]


def test_a_zombie_of_an_older_attempt_never_commits_and_its_staging_goes(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    core = start()
    core.saves.register(FIRST, request(20))
    core.claim(SECOND, "main", None)
    core.tick()
    write_all(tmp_path, FIRST, 20)
    clock.go(31)
    core.tick()
    assert RunDirectory(tmp_path).steps() == []
    assert not RunDirectory(tmp_path).owner(0, FIRST.incarnation).exists()


def test_a_step_committed_by_an_older_attempt_is_not_saved_again(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    before = manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10)
    core.claim(SECOND, "main", None)
    status = core.saves.register(SECOND, request(10))
    assert (status.state, status.manifest_digest) == (SaveState.COMMITTED, before.digest)
    write_all(tmp_path, SECOND, 10)
    clock.go(31)
    core.tick()
    assert manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10) == before
    assert not directory(tmp_path, SECOND, 10).files.exists()


def test_a_damaged_step_of_an_older_attempt_is_replaced_by_a_new_save(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 5)
    commit(core, tmp_path, 10)
    (tmp_path / "global_step_10/actor/checkpoint_rank_0.pt").unlink()
    core.claim(SECOND, "main", None)
    resumed = core.resume(SECOND)
    assert resumed is not None
    assert resumed.step == pointer(tmp_path) == 5
    assert healthy(core)[0] is ConditionStatus.FALSE
    commit(core, tmp_path, 10, SECOND)
    found = manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10)
    assert found.manifest.attempt == 1
    manifest.check_manifest(RunDirectory(tmp_path), found.manifest, with_digest=True)
    assert pointer(tmp_path) == 10
    assert healthy(core)[0] is ConditionStatus.TRUE


class KilledError(BaseException):
    """The monitor dies here."""


def test_a_crash_amid_replacing_a_damaged_step_leaves_no_manifest_over_a_mixture(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 5)
    commit(core, tmp_path, 10)
    (tmp_path / "global_step_10/actor/checkpoint_rank_0.pt").unlink()
    seen: list[str] = []

    def die_at_the_second_file(phase: str) -> None:
        seen.append(phase)
        if seen.count("promoting") == 2:
            raise KilledError

    failpoints.enable(failpoints.COMMIT, die_at_the_second_file)
    again = start(claim=SECOND)
    again.saves.register(SECOND, request(10))
    write_all(tmp_path, SECOND, 10)
    with pytest.raises(KilledError):
        again.tick()
    newest, _ = pointers.newest_valid(RunDirectory(tmp_path), CHECKPOINT)
    assert newest is not None
    assert newest.manifest.step == 5


# Resume.


def test_a_new_run_has_nothing_to_resume_from(start: Start) -> None:
    assert start().resume(FIRST) is None


def test_with_every_manifest_gone_resume_is_an_error_never_step_0(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    RunDirectory(tmp_path).manifest(CHECKPOINT, 10).unlink()
    again = start(claim=SECOND)
    with pytest.raises(errors.NoValidCheckpointError, match="latest_checkpointed_iteration"):
        again.resume(SECOND)
    assert healthy(again)[0] is ConditionStatus.FALSE


def test_every_rank_of_an_attempt_resumes_from_the_same_step(start: Start, tmp_path: Path) -> None:
    core = start()
    commit(core, tmp_path, 10)
    points = [core.resume(FIRST) for _ in range(3)]
    assert points[0] is not None
    assert points == [points[0]] * 3
    assert points[0].path == "global_step_10"


# Retention.


def test_retention_keeps_the_newest_and_never_the_pointers_target_less(
    start: Start, tmp_path: Path
) -> None:
    core = start(max_to_keep=2)
    for step in (10, 20, 30, 40):
        commit(core, tmp_path, step)
        assert pointer(tmp_path) == step
    assert RunDirectory(tmp_path).steps() == [30, 40]
    assert core.view().checkpoint.retained == [30, 40]


def test_what_the_attempt_resumed_from_stays(start: Start, tmp_path: Path) -> None:
    core = start(max_to_keep=1)
    commit(core, tmp_path, 10)
    core.claim(SECOND, "main", None)
    core.resume(SECOND)
    for step in (11, 12):
        commit(core, tmp_path, step, SECOND, STATE_DICT)
    core = start(claim=None, max_to_keep=1)  # it is on the disk, not in memory
    commit(core, tmp_path, 13, SECOND, STATE_DICT)
    assert RunDirectory(tmp_path).steps() == [10, 13]
    write_all(tmp_path, FIRST, 20)  # an older attempt's does not count
    core.tick()
    commit(core, tmp_path, 14, SECOND, STATE_DICT)
    assert RunDirectory(tmp_path).steps() == [10, 14]
    commit(core, tmp_path, 20, SECOND)
    assert RunDirectory(tmp_path).steps() == [14, 20]


def test_with_its_record_damaged_nothing_goes_until_a_newer_checkpoint_stands(
    start: Start, tmp_path: Path
) -> None:
    core = start(max_to_keep=1)
    commit(core, tmp_path, 10)
    core.claim(SECOND, "main", None)
    core.resume(SECOND)
    RunDirectory(tmp_path).resume_target.write_text("{")
    for step in (11, 12):
        commit(core, tmp_path, step, SECOND, STATE_DICT)
    assert RunDirectory(tmp_path).steps() == [10, 11, 12]
    assert "RESUME.json" in (core.view().checkpoint.last_error or "")
    commit(core, tmp_path, 20, SECOND)
    assert RunDirectory(tmp_path).steps() == [12, 20]
    assert core.view().checkpoint.last_error is None


def test_a_save_committed_and_retained_away_is_still_known_as_committed(
    start: Start, tmp_path: Path
) -> None:
    core = start(max_to_keep=1)
    commit(core, tmp_path, 10)
    commit(core, tmp_path, 20)
    assert RunDirectory(tmp_path).steps() == [20]
    for one in (core, start()):
        assert one.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED
        assert one.saves.register(FIRST, request(10)).state is SaveState.COMMITTED


def test_a_damaged_newest_checkpoint_does_not_cost_the_last_valid_one(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    for step in (10, 20):
        commit(core, tmp_path, step)
    (tmp_path / "global_step_20/actor/checkpoint_rank_0.pt").unlink()
    start(claim=None, max_to_keep=1).tick()
    assert 10 in RunDirectory(tmp_path).steps()
    assert pointer(tmp_path) == 10


def test_a_state_dict_that_an_open_checkpoint_reuses_stays(start: Start, tmp_path: Path) -> None:
    core = start(max_to_keep=1)
    core.saves.register(FIRST, request(10, ranks=1, reuse=True))
    for step in (10, 11, 12):
        commit(core, tmp_path, step, kind=STATE_DICT)
    assert RunDirectory(tmp_path).steps() == [10, 12]
    entry = stage(tmp_path, FIRST, 10, 0, path="actor/optim.pt")
    receipts.write_receipt(directory(tmp_path, FIRST, 10), receipt(FIRST, 10, 0, CHECKPOINT, entry))
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED


def test_retention_that_was_interrupted_goes_on_after_a_restart(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    for step in (10, 20, 30):
        commit(core, tmp_path, step)
    start(max_to_keep=1).tick()
    assert RunDirectory(tmp_path).steps() == [30]
    assert list(RunDirectory(tmp_path).trash.iterdir()) == []


def test_outcomes_in_staging_are_bounded(start: Start, tmp_path: Path) -> None:
    core = start(max_to_keep=1)
    for step in range(OUTCOMES_KEPT + 5):
        core.saves.register(FIRST, request(step, ranks=1))
        fail(core, step)
    core.tick()
    kept = list((RunDirectory(tmp_path).owner(0, FIRST.incarnation) / "checkpoint").iterdir())
    assert len(kept) == OUTCOMES_KEPT


def test_an_old_step_that_aborts_late_is_not_forgotten_for_newer_ones_that_ended_before(
    start: Start, tmp_path: Path
) -> None:
    core = start(max_to_keep=1)
    core.saves.register(FIRST, request(1, ranks=1))
    for step in range(2, OUTCOMES_KEPT + 5):
        core.saves.register(FIRST, request(step, ranks=1))
        fail(core, step)
        core.tick()
    fail(core, 1)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 1).state is SaveState.ABORTED
    assert receipts.read_outcome(directory(tmp_path, FIRST, 1)) is not None


# Restart.


def test_a_restarted_monitor_goes_on_where_the_lost_one_stopped(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.saves.register(FIRST, request(20))
    write(tmp_path, FIRST, 20, 0)
    core.saves.register(FIRST, request(15))
    fail(core, 15)
    core.tick()
    again = start(claim=None)
    again.tick()
    for step, state in ((10, "committed"), (15, "aborted"), (20, "registered")):
        assert again.saves.save_status(FIRST, CHECKPOINT, step).state == state
    # All but the free space, which any other process of this machine changes.
    assert replace(again.view(), volume=None) == replace(core.view(), volume=None)
    write(tmp_path, FIRST, 20, 1)
    again.tick()
    assert again.saves.save_status(FIRST, CHECKPOINT, 20).state is SaveState.COMMITTED


def test_claims_of_a_deleted_run_of_the_same_name_do_not_count(
    start: Start, tmp_path: Path
) -> None:
    commit(start(run_uid="old"), tmp_path, 10)
    core = start(claim=None, run_uid="new")
    with pytest.raises(errors.FencedError):
        core.resume(FIRST)
    owner = Owner(0, "cccccccc")
    core.claim(owner, "main", 0)
    assert core.resume(owner) is not None
    core.tick()
    assert not RunDirectory(tmp_path).owner(0, FIRST.incarnation).exists()


# The gate.


def test_without_the_lease_nothing_changes_and_every_call_is_not_ready(
    start: Start, tmp_path: Path
) -> None:
    lease = SimpleNamespace(held=True, term=1)

    def gate() -> None:
        if not lease.held:
            raise errors.NotReadyError("no Lease")

    core = start(authority=Authority(gate=gate, term=lambda: lease.term))
    commit(core, tmp_path, 5)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    lease.held = False
    core.tick()
    with pytest.raises(errors.NotReadyError):
        core.saves.save_status(FIRST, CHECKPOINT, 10)
    with pytest.raises(errors.NotReadyError):
        core.claim(SECOND, "main", None)
    assert not core.ready
    assert RunDirectory(tmp_path).steps() == [5]

    # Meanwhile another monitor held the Lease, committed and removed.
    other = start(claim=None, max_to_keep=1)
    other.tick()
    commit(other, tmp_path, 11)
    lease.held, lease.term = True, 2
    core.tick()
    assert core.ready
    assert core.saves.save_status(FIRST, CHECKPOINT, 11).state is SaveState.COMMITTED
    assert core.view().checkpoint == other.view().checkpoint
    assert core.view().checkpoint.retained == [11]


@pytest.mark.parametrize("phase", ["promoting", "promoted"])
def test_a_lease_lost_amid_a_commit_stops_it_and_it_goes_on_later(
    start: Start, tmp_path: Path, phase: str
) -> None:
    lease = SimpleNamespace(held=True, term=1)

    def gate() -> None:
        if not lease.held:
            raise errors.NotReadyError("no Lease")

    def lose(at: str) -> None:
        if at == phase and lease.term == 1:
            lease.held = False

    failpoints.enable(failpoints.COMMIT, lose)
    core = start(authority=Authority(gate=gate, term=lambda: lease.term))
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    core.tick()
    moved = list((tmp_path / "global_step_10").rglob("*.pt"))
    assert len(moved) == {"promoting": 0, "promoted": 2}[phase]
    assert not RunDirectory(tmp_path).manifest(CHECKPOINT, 10).exists()
    lease.held, lease.term = True, 2
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED


# Reports.


def test_reports_show_in_the_view(start: Start, clock: Clock) -> None:
    core = start()
    core.report_progress(FIRST, ProgressReport(step=0, total_steps=100))
    clock.go(60)
    metrics = {"reward": 0.5, "loss": float("nan")}
    core.report_progress(FIRST, ProgressReport(step=10, total_steps=100, metrics=metrics))
    explorers = [
        ExplorerReport(id="b", version=10, state="running"),
        ExplorerReport(id="a", version=-1, state="require_sync"),
        ExplorerReport(id="c", version=0, state="stopped"),
    ]
    core.report_weights(
        FIRST, WeightsReport(trainer_version=10, method="memory", explorers=explorers)
    )
    view = core.view()
    assert view.progress is not None
    assert (view.progress.steps_per_minute, view.progress.metrics) == (10.0, {"reward": 0.5})
    assert view.progress.eta is not None
    assert (view.progress.eta - clock.now).total_seconds() == 540
    assert view.weights is not None
    assert view.weights.lag == 11
    assert [(e.id, e.lag) for e in view.weights.explorers] == [("a", 11), ("b", 0), ("c", 10)]
    in_sync = view.conditions[1]
    assert (in_sync.status, in_sync.reason) == (ConditionStatus.FALSE, "ExplorersBehind")
