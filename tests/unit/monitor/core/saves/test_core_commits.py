"""A save is committed with the receipts of all participants, and the pointer moves forward."""

from pathlib import Path

from trainsync.api.protocol import ParticipantRef, ReceiptHint, SaveState
from trainsync.monitor.commit.cleanup import OUTCOMES_KEPT
from trainsync.monitor.ledger.saves import SaveKey
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, receipts

from tests.unit.monitor.core.cores import Start, commit, fail, pointer
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    content,
    directory,
    receipt,
    request,
    stage,
    write,
    write_all,
)


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
    who = ParticipantRef(component="model", rank=0)
    hint = ReceiptHint(kind=CHECKPOINT, step=10, participant=who)
    core.saves.receipt_hint(FIRST, hint)
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.REGISTERED
    write(tmp_path, FIRST, 10, 0)
    core.saves.receipt_hint(FIRST, hint)
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED


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
