"""Checkpoints are read to the last bit where the run wants digests."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.api.spec import Verify
from trainsync.monitor import errors
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.digest import file_digest
from trainsync.storage.inspect import digests
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import pointers, quarantine

from tests.unit.monitor.resume.resuming import (
    THIRD,
    Seen,
    Start,
    flip,
    is_committed,
    message,
    pointer,
    report,
    resume,
    settle,
    step_of,
    train,
)
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write_all


def test_a_checkpoint_with_a_flipped_bit_is_set_aside_for_the_one_before(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    path = flip(tmp_path, 20)
    core = start(SECOND, Verify.DIGEST)
    with pytest.raises(errors.VerifyingError, match="checkpoint 20 is read to the last bit"):
        core.resume(SECOND)
    assert step_of(resume(core, SECOND)) == 10
    assert (pointer(tmp_path), seen.steps) == (10, [20])
    assert not is_committed(tmp_path, 20)
    assert RunDirectory(tmp_path).set_aside(CHECKPOINT, 20).exists()
    assert path.exists(), "it can be looked at"
    assert "checkpoint 20 is set aside" in message(core)
    assert f"{path.name}: has digest" in message(core)
    last = core.view().checkpoint.last_committed
    assert last is not None
    assert last.step == 10
    # A monitor that restarts says so too, until the step is saved again.
    core = start(SECOND, Verify.DIGEST)
    assert "checkpoint 20 is set aside" in message(core)
    train(core, tmp_path, SECOND, 20)
    assert "set aside" not in message(core)
    assert step_of(resume(core, SECOND)) == 20


def test_every_checkpoint_on_the_way_to_a_whole_one_is_set_aside(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20, 30)
    flip(tmp_path, 20)
    flip(tmp_path, 30, rank=0)
    assert step_of(resume(start(SECOND, Verify.DIGEST), SECOND)) == 10
    assert sorted(seen.steps) == [20, 30]


def test_all_of_an_attempt_are_told_the_same_and_the_bytes_are_read_once(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    core = start(SECOND, Verify.DIGEST)
    points = [resume(core, SECOND) for _ in range(3)]
    assert [step_of(point) for point in points] == [20, 20, 20]
    core = start(SECOND, Verify.DIGEST)  # the monitor restarts
    assert core.resume(SECOND) == points[0]
    assert len(reads) == 2, "each file once"
    train(core, tmp_path, SECOND, 30)
    assert step_of(core.resume(SECOND)) == 30, "its own were read before they were committed"
    assert step_of(resume(start(THIRD, Verify.DIGEST), THIRD)) == 30
    assert len(reads) == 4, "the next attempt reads again"


def test_sizes_alone_are_looked_at_where_the_run_does_not_want_digests(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    assert step_of(start(SECOND).resume(SECOND)) == 20
    assert not reads


@pytest.mark.parametrize("verify", list(Verify))
def test_with_no_older_one_left_nothing_changes_and_it_is_never_step_0(
    start: Start, tmp_path: Path, verify: Verify
) -> None:
    core = start(FIRST, verify, max_to_keep=1)
    train(core, tmp_path, FIRST, 10, 20)
    path = flip(tmp_path, 20)
    core = start(SECOND, verify, max_to_keep=1)
    if verify is Verify.SIZE:
        assert step_of(core.resume(SECOND)) == 20
        report(core, SECOND, 20)
        settle(core)
        core = start(THIRD, verify, max_to_keep=1)
    owner = SECOND if verify is Verify.DIGEST else THIRD
    why = r"maxToKeep: 1.*the bytes of 20 have changed: .*checkpoint_rank_1.pt: has digest"
    for _ in range(2):
        with pytest.raises(errors.NoValidCheckpointError, match=why):
            resume(core, owner)
    assert (pointer(tmp_path), is_committed(tmp_path, 20)) == (20, True)
    assert "no checkpoint is left" in message(core)
    flip(tmp_path, 20)  # the file is restored
    assert path.exists()
    fourth = SaveOwner(3, "dddddddd3")
    assert step_of(resume(start(fourth, verify, max_to_keep=1), fourth)) == 20
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []


def test_requests_are_answered_while_a_checkpoint_is_read(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    go = threading.Event()

    def slow(path: Path, on_block: Callable[[int], None]) -> str:
        assert go.wait(20)
        return file_digest(path, on_block)

    monkeypatch.setattr(digests, "file_digest", slow)
    core = start(SECOND, Verify.DIGEST)
    with pytest.raises(errors.VerifyingError, match=r"0\.0 of 0\.0 GB"):
        core.resume(SECOND)
    train(core, tmp_path, SECOND, 30)
    assert core.busy
    go.set()
    settle(core)
    assert step_of(core.resume(SECOND)) == 30


def test_an_attempt_that_could_not_wait_has_not_made_the_next_one_wait(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    core = start(FIRST, Verify.DIGEST)
    train(core, tmp_path, FIRST, 10, 20)
    core.claim(SECOND, "main", None)
    with pytest.raises(errors.VerifyingError):
        core.resume(SECOND)
    settle(core)
    core.claim(THIRD, "main", None)
    assert step_of(core.resume(THIRD)) == 20
    assert len(reads) == 2
    fourth = SaveOwner(3, "dddddddd3")
    core.claim(fourth, "main", None)
    assert step_of(resume(core, fourth)) == 20
    assert len(reads) == 4, "the answer was used: bytes may have changed since"


def test_the_kinds_are_not_mixed_up(start: Start, tmp_path: Path) -> None:
    core = start(FIRST, Verify.DIGEST)
    train(core, tmp_path, FIRST, 10)
    core.saves.register(FIRST, request(20, SaveKind.STATE_DICT))
    write_all(tmp_path, FIRST, 20, SaveKind.STATE_DICT)
    core.tick()
    core = start(SECOND, Verify.DIGEST)
    assert step_of(resume(core, SECOND)) == 10
    assert pointers.read_pointer(RunDirectory(tmp_path), SaveKind.STATE_DICT) == 20


def test_what_another_run_of_the_name_saved_is_read_though_the_attempt_is_the_same(
    start: Start, tmp_path: Path, reads: list[Path]
) -> None:
    train(start(FIRST, run_uid="before"), tmp_path, FIRST, 10)
    core = start(FIRST, Verify.DIGEST, run_uid="again")
    assert step_of(resume(core, FIRST)) == 10
    assert len(reads) == 2
