"""A part that is whole in memory is written as its rank would have written the part."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.checkpoint.rescue import finish
from trainsync.checkpoint.rescue.finish import rescue
from trainsync.checkpoint.rescue.messages import KeptPart
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import SaveOutcome
from trainsync.storage.saves.writers import Writer

from tests.distributed.processes.forked import CONTEXT
from tests.unit.checkpoint.memory.keeping import INCARNATION
from tests.unit.checkpoint.rescue.rescues import (
    CHECKPOINT,
    DATA,
    DEAD,
    PATH,
    Saving,
    part_of,
    receipt_of,
)


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    return Saving(tmp_path)


def test_a_part_in_memory_is_written_with_its_small_files_and_a_receipt(saving: Saving) -> None:
    saving.register(5)
    kept = saving.keep(5, attachments={"actor/config.json": b"{}"})
    rescue(saving.place, {part_of(5): kept})
    (receipt,) = saving.written(5)
    assert saving.bytes_of(receipt) == {PATH.format(0): DATA, "actor/config.json": b"{}"}
    assert receipt.files[0] == receipt_of(5).files[0]
    assert receipt.rescued
    assert receipt.seconds >= 0.25


def test_each_part_is_spoken_of_before_the_first_is_written(saving: Saving) -> None:
    for step in (5, 6):
        saving.register(step)
    rescue(saving.place, {part_of(5): saving.keep(5), part_of(6): None})
    assert [found.kept for found in saving.place.save(CHECKPOINT, 6).rescues()] == [False]
    assert [found.kept for found in saving.place.save(CHECKPOINT, 5).rescues()] == [True]
    assert [receipt.step for receipt in saving.written(5)] == [5]
    assert saving.written(6) == saving.failed(6) == []


def test_of_a_save_that_has_ended_and_of_a_part_with_a_receipt_nothing_is_written(
    saving: Saving,
) -> None:
    for step in (5, 6):
        saving.register(step)
    receipts.write_outcome(saving.save(5), SaveOutcome(kind=CHECKPOINT, step=5, error="too late"))
    receipts.write_receipt(saving.save(6), receipt_of(6))
    before = saving.written(6)
    rescue(saving.place, {part_of(5): saving.keep(5), part_of(6): saving.keep(6)})
    assert saving.written(5) == []
    assert saving.written(6) == before
    assert saving.place.save(CHECKPOINT, 6).rescues() == []


def test_of_a_save_whose_records_are_swept_nothing_is_said_and_nothing_written(
    saving: Saving,
) -> None:
    saving.register(5)
    kept = saving.keep(5)
    shutil.rmtree(saving.save(5).path)
    rescue(saving.place, {part_of(5): kept})
    assert not saving.save(5).path.exists()


def test_bytes_that_changed_in_memory_are_no_part(saving: Saving) -> None:
    saving.register(5)
    kept = saving.keep(5)
    with kept.file.open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"\0")
    rescue(saving.place, {part_of(5): kept})
    assert saving.written(5) == []
    (error,) = saving.failed(5)
    assert "has changed in memory" in error


def test_a_file_that_was_dropped_ends_the_save_and_the_other_part_is_written(
    saving: Saving,
) -> None:
    saving.register(5)
    parts = {part_of(5, 0): saving.keep(5, 0), part_of(5, 1): saving.keep(5, 1)}
    parts[part_of(5, 0)].file.unlink()
    rescue(saving.place, dict(parts))
    assert [receipt.rank for receipt in saving.written(5)] == [1]
    (error,) = saving.failed(5)
    assert "its process died" in error


@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_that_was_started_anew_writes_the_part_undisturbed(
    saving: Saving, is_first: bool
) -> None:
    """Whether it comes to the step before what outlives its predecessor, or while that writes."""
    saving.register(5)
    kept, part = saving.keep(5), part_of(5)
    Writer(saving.run, 0, INCARNATION, continues=DEAD).claim(CHECKPOINT, 5, part.participant)
    anew = Writer(saving.run, 0, INCARNATION)
    if is_first:
        anew.claim(CHECKPOINT, 5, part.participant)
        rescue(saving.place, {part: kept})
    else:
        claims = []

        def come(point: str) -> None:
            if point == "finishing":
                claims.append(anew.claim(CHECKPOINT, 5, part.participant))

        with failpoints.enabled(failpoints.RESCUE, come):
            rescue(saving.place, {part: kept})
        assert claims == [(DEAD,)]
    assert saving.written(5) == saving.failed(5) == []
    assert [word.kept for word in saving.place.save(CHECKPOINT, 5).rescues()] == [False]
    assert anew.claim(CHECKPOINT, 5, part.participant) == (DEAD,), "it is told of no second writer"


def test_a_save_that_ends_is_not_written_to_its_end(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish, "_LOOK_SECONDS", 0.0)
    saving.register(5)
    kept = saving.keep(5)

    def end(point: str) -> None:
        if point == "finishing":
            outcome = SaveOutcome(kind=CHECKPOINT, step=5, error="restarted")
            receipts.write_outcome(saving.save(5), outcome)

    reached: list[str] = []
    with (
        failpoints.enabled(failpoints.RESCUE, end),
        failpoints.enabled(failpoints.RESCUE, reached.append),
    ):
        rescue(saving.place, {part_of(5): kept})
    assert reached == ["finishing"]
    assert saving.written(5) == saving.failed(5) == []


def rescue_until(directory: Path, kept: KeptPart, point: str) -> None:
    """In a process of its own, which kills itself at ``point``."""

    def handler(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(failpoints.RESCUE, handler)
    rescue(Saving(directory).place, {part_of(5): kept})


@pytest.mark.parametrize("point", failpoints.POINTS["rescue"])
def test_what_outlives_a_rank_and_is_killed_too_leaves_no_receipt_and_the_next_may_write(
    saving: Saving, tmp_path: Path, point: str
) -> None:
    saving.register(5)
    kept = saving.keep(5)
    process = CONTEXT.Process(target=rescue_until, args=(tmp_path, kept, point))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert saving.written(5) == saving.failed(5) == []
    rescue(saving.place, {part_of(5): kept})
    (receipt,) = saving.written(5)
    assert saving.bytes_of(receipt) == {PATH.format(0): DATA}
    assert (receipt.writer, receipt.replaces) == (DEAD, ())
