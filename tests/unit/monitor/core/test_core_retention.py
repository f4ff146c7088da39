"""Checkpoints and outcomes that are kept, and those that are removed."""

from pathlib import Path

from trainsync.api.protocol import SaveState
from trainsync.monitor.commit.cleanup import OUTCOMES_KEPT
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import receipts

from tests.unit.monitor.core.cores import Start, commit, fail, pointer
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    directory,
    receipt,
    request,
    stage,
    write_all,
)


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
