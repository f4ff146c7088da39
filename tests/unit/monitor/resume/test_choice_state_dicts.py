"""State dicts that list the same files as a damaged checkpoint."""

from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.api.spec import Verify
from trainsync.monitor.core.core import MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers, quarantine, receipts

from tests.unit.monitor.fleet import CrashError
from tests.unit.monitor.resume.resuming import (
    THIRD,
    Seen,
    Start,
    flip,
    is_alive,
    message,
    pointer,
    report,
    resume,
    step_of,
    train,
)
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    directory,
    receipt,
    request,
    stage,
    write_all,
)
from tests.waiting import eventually


def train_both(core: MonitorCore, root: Path, owner: SaveOwner, *steps: int) -> None:
    """Save state dicts, and checkpoints that reuse their files."""
    for step in steps:
        for kind in (SaveKind.STATE_DICT, CHECKPOINT):
            core.saves.register(owner, request(step, kind, reuse=kind is CHECKPOINT))
            write_all(root, owner, step, kind)
        core.tick()
        assert pointer(root) == step


def train_own(core: MonitorCore, root: Path, owner: SaveOwner, step: int) -> None:
    """Save a checkpoint with weights of its own, under the names that state dicts have."""
    core.saves.register(owner, request(step))
    save = directory(root, owner, step)
    for rank in range(2):
        path = f"actor/{SaveKind.STATE_DICT.value}_rank_{rank}.pt"
        entry = stage(root, owner, step, rank, path=path)
        receipts.write_receipt(save, receipt(owner, step, rank, CHECKPOINT, entry))
    core.tick()
    assert core.saves.save_status(owner, CHECKPOINT, step).error is None
    assert pointer(root) == step


def flip_weights(root: Path, step: int) -> None:
    path = root / f"global_step_{step}/actor/{SaveKind.STATE_DICT.value}_rank_0.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def state_dict_pointer(root: Path) -> int | None:
    return pointers.read_pointer(RunDirectory(root), SaveKind.STATE_DICT)


def test_the_state_dict_with_the_same_damage_is_quarantined_and_blocks_no_resume(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train_both(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    flip_weights(tmp_path, 20)
    core = start(SECOND, Verify.DIGEST)
    assert step_of(resume(core, SECOND)) == 10
    assert (pointer(tmp_path), state_dict_pointer(tmp_path), seen.steps) == (10, 10, [20])
    last = core.view().checkpoint.last_state_dict
    assert last is not None
    assert last.step == 10
    assert "set aside with the state dict that shares its files" in message(core)
    train_own(core, tmp_path, SECOND, 20)
    assert core.view().checkpoint.last_error is None
    assert step_of(resume(start(THIRD, Verify.DIGEST), THIRD)) == 20


def test_a_whole_state_dict_beside_a_damaged_checkpoint_stays(start: Start, tmp_path: Path) -> None:
    train_both(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    assert step_of(resume(start(SECOND, Verify.DIGEST), SECOND)) == 10
    assert (pointer(tmp_path), state_dict_pointer(tmp_path)) == (10, 20)


def test_the_last_state_dict_may_be_set_aside_and_its_pointer_comes_with_the_next(
    start: Start, tmp_path: Path
) -> None:
    core = start(FIRST, Verify.DIGEST)
    train(core, tmp_path, FIRST, 10)
    train_both(core, tmp_path, FIRST, 20)
    flip_weights(tmp_path, 20)
    core = start(SECOND, Verify.DIGEST)
    assert step_of(resume(core, SECOND)) == 10
    assert state_dict_pointer(tmp_path) is None
    train_both(core, tmp_path, SECOND, 15)
    assert state_dict_pointer(tmp_path) == 15
    assert core.view().checkpoint.last_error is None


@pytest.mark.parametrize("killed_at", ["set_aside", "repair_pointer", "remove_request"])
@pytest.mark.parametrize("older", [[10], []], ids=["an older state dict", "the last state dict"])
def test_a_monitor_killed_between_the_two_is_finished_by_the_next(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: str,
    older: list[int],
) -> None:
    real, calls = manifest.set_aside, []

    def kill(*args: object) -> bool:
        calls.append(args)
        if killed_at != "set_aside" or len(calls) == 2:
            raise CrashError
        return real(*args)  # type: ignore[arg-type]  # passed on as they came

    core = start(FIRST)
    train(core, tmp_path, FIRST, 5)
    train_both(core, tmp_path, FIRST, *older, 20)
    flip_weights(tmp_path, 20)
    core = start(SECOND)
    assert step_of(core.resume(SECOND)) == 20
    report(core, SECOND, 20)
    core.tick()
    eventually(lambda: not is_alive(core))
    owner = {"set_aside": manifest, "repair_pointer": pointers, "remove_request": quarantine}[
        killed_at
    ]
    with monkeypatch.context() as patch:
        patch.setattr(owner, killed_at, kill)
        with pytest.raises(CrashError):
            core.poll()
    core = start(THIRD)
    assert step_of(resume(core, THIRD)) == (10 if older else 5)
    assert state_dict_pointer(tmp_path) == (10 if older else None)
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []
    train_own(core, tmp_path, THIRD, 20)
    assert "set aside" not in message(core)
