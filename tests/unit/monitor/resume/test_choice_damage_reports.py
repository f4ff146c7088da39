"""Damage that a rank reports is read for, and set aside for the next attempt."""

from pathlib import Path

import pytest
from trainsync.api.protocol import DamageReport
from trainsync.api.spec import Verify
from trainsync.monitor import errors
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import quarantine, receipts

from tests.unit.monitor.resume.resuming import (
    THIRD,
    Seen,
    Start,
    flip,
    message,
    pointer,
    report,
    resume,
    settle,
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
    write,
)


def test_what_a_rank_reports_is_read_and_set_aside_for_the_next_attempt(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    core = start(SECOND)
    assert step_of(core.resume(SECOND)) == 20
    report(core, SECOND, 20)
    settle(core)
    assert (pointer(tmp_path), seen.steps) == (10, [20])
    assert "checkpoint 20 is set aside" in message(core)
    # Others of this attempt have the damaged one.
    with pytest.raises(errors.ResumeLostError, match=r"from step 20, .* next .* from step 10"):
        core.resume(SECOND)
    assert step_of(start(THIRD).resume(THIRD)) == 10


def test_damage_that_older_steps_share_sets_them_aside_too(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10)
    for step in (20, 30):  # rank 1 has the same file at both
        core.saves.register(FIRST, request(step))
        write(tmp_path, FIRST, step, 0)
        entry = stage(tmp_path, FIRST, step, 1, data=b"frozen" * 100)
        staged = directory(tmp_path, FIRST, step).files / entry.path
        if step == 30:
            staged.unlink()
            staged.hardlink_to(tmp_path / "global_step_20" / entry.path)
        receipts.write_receipt(
            directory(tmp_path, FIRST, step), receipt(FIRST, step, 1, CHECKPOINT, entry)
        )
        core.tick()
    flip(tmp_path, 30)
    core = start(SECOND)
    assert step_of(core.resume(SECOND)) == 30
    report(core, SECOND, 30)
    settle(core)
    assert (pointer(tmp_path), seen.steps) == (10, [30, 20])
    assert step_of(start(THIRD).resume(THIRD)) == 10


def test_an_attempt_waits_for_what_a_rank_of_the_one_before_reported(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    report(start(SECOND), SECOND, 20)  # whose monitor ends before it has read anything
    core = start(THIRD)
    with pytest.raises(errors.VerifyingError):
        core.resume(THIRD)
    assert step_of(resume(core, THIRD)) == 10
    assert seen.steps == [20]


def test_a_rank_that_is_wrong_costs_one_reading_and_its_node_is_named(
    start: Start, tmp_path: Path, seen: Seen, reads: list[Path]
) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    core = start(SECOND)
    core.resume(SECOND)
    for rank in range(3):
        report(core, SECOND, 20, f"node-7, rank {rank}: has digest 1, expected 2")
        settle(core)
    assert len(reads) == 2, "each file once, however many say so"
    assert (pointer(tmp_path), seen.steps) == (20, [])
    assert "look at the rank's node: node-7" in message(core)
    assert step_of(core.resume(SECOND)) == 20
    assert step_of(start(THIRD).resume(THIRD)) == 20
    assert quarantine.requested_steps(RunDirectory(tmp_path)) == []


def test_a_report_that_comes_after_the_reading_is_read_for(
    start: Start, tmp_path: Path, seen: Seen
) -> None:
    train(start(FIRST, Verify.DIGEST), tmp_path, FIRST, 10, 20)
    core = start(SECOND, Verify.DIGEST)
    assert step_of(resume(core, SECOND)) == 20
    flip(tmp_path, 20)
    report(core, SECOND, 20)
    settle(core)
    assert seen.steps == [20]


def test_reports_of_others_change_nothing(start: Start, tmp_path: Path, reads: list[Path]) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    flip(tmp_path, 20)
    core = start(SECOND)
    with pytest.raises(errors.FencedError):
        report(core, FIRST, 20)
    for step, digest in ((20, "sha256:other"), (40, "sha256:none")):
        core.damage(SECOND, DamageReport(step=step, manifest_digest=digest, error="differs"))
    settle(core)
    assert not reads
    assert step_of(core.resume(SECOND)) == 20
