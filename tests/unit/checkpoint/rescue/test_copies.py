"""A copy of a part whose pod is gone is written where that is asked for, and nowhere else."""

import errno
from pathlib import Path

import pytest
from trainsync.checkpoint.rescue.copies import offer, rescue_all
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey, PartTold
from trainsync.checkpoint.save.places.volume import VolumePlace, VolumeRecords
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import Participant, Rescue, SaveOutcome

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


class Offering:
    """An offer by a clock of its own; ``at`` is done once so many seconds have gone by."""

    def __init__(self, directory: Path) -> None:
        self.saving = Saving(directory)
        self.now = 0.0
        self.wanted_at: dict[float, int] = {}

    def offer(self, *steps: int) -> float:
        """How long it took."""
        copies = {part_of(step): self.saving.keep(step) for step in steps}
        offer(self.saving.place, copies, lambda: self.now, self._sleep)
        return self.now

    def want(self, step: int) -> None:
        self.saving.place.save(CHECKPOINT, step).want_copies()

    def words(self, step: int) -> list[Rescue]:
        return self.saving.place.save(CHECKPOINT, step).rescues()

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [when for when in self.wanted_at if when <= self.now]:
            self.want(self.wanted_at.pop(due))


@pytest.fixture
def offering(tmp_path: Path) -> Offering:
    return Offering(tmp_path)


def test_a_copy_that_is_wanted_becomes_the_part_in_the_name_of_the_dead_writer(
    offering: Offering,
) -> None:
    offering.saving.register(5)
    offering.wanted_at = {30.0: 5}
    assert 30.0 <= offering.offer(5) < 32.0
    (receipt,) = offering.saving.written(5)
    assert (receipt.writer, receipt.rescued) == (DEAD, True)
    assert offering.saving.bytes_of(receipt) == {PATH.format(0): DATA}
    assert [word.kept for word in offering.words(5)] == [True]


def test_what_nothing_asks_for_is_not_written_and_offered_for_ten_minutes(
    offering: Offering,
) -> None:
    offering.saving.register(5)
    assert 600.0 <= offering.offer(5) < 602.0
    assert offering.saving.written(5) == offering.words(5) == []


def test_an_offer_ends_with_the_saves(offering: Offering) -> None:
    offering.saving.register(5)
    outcome = SaveOutcome(kind=CHECKPOINT, step=5, manifest_digest="d")
    receipts.write_outcome(offering.saving.save(5), outcome)
    assert offering.offer(4, 5) == 0.0, "nothing is known of the other step any more"
    assert offering.saving.written(5) == offering.saving.written(4) == []


@pytest.mark.parametrize("kept", [True, False])
def test_a_part_of_which_something_is_heard_is_left_to_that(offering: Offering, kept: bool) -> None:
    offering.saving.register(5)
    word = Rescue(component="model", rank=0, kept=kept)
    offering.saving.place.save(CHECKPOINT, 5).write_rescue(word)
    offering.want(5)
    assert offering.offer(5) == 0.0
    assert offering.saving.written(5) == []
    assert offering.words(5) == [word]


def test_a_look_that_fails_is_done_again(
    offering: Offering, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = VolumeRecords.has_rescue, [2]

    def fails(self: VolumeRecords, participant: Participant) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(self, participant)

    monkeypatch.setattr(VolumeRecords, "has_rescue", fails)
    offering.saving.register(5)
    offering.want(5)
    assert 0.0 < offering.offer(5) < 2.0
    assert [receipt.step for receipt in offering.saving.written(5)] == [5]


def test_a_part_with_a_receipt_is_not_written_again(offering: Offering) -> None:
    offering.saving.register(5)
    receipts.write_receipt(offering.saving.save(5), receipt_of(5))
    before = offering.saving.written(5)
    offering.want(5)
    assert offering.offer(5) == 0.0
    assert offering.saving.written(5) == before


def test_a_copy_that_was_dropped_meanwhile_fails_the_part_and_the_older_step_is_written(
    offering: Offering,
) -> None:
    for step in (5, 6):
        offering.saving.register(step)
        offering.want(step)
    copies = {part_of(step): offering.saving.keep(step) for step in (5, 6)}
    copies[part_of(6)].file.unlink()
    offer(offering.saving.place, copies)
    assert [receipt.step for receipt in offering.saving.written(5)] == [5]
    assert offering.saving.written(6) == []
    assert len(offering.saving.failed(6)) == 1


def test_a_rank_s_own_part_is_finished_beside_copies_of_another_one_s(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.register(5)
    saving.place.save(CHECKPOINT, 5).want_copies()
    own, other = saving.keep(5, 0), saving.keep(5, 1)
    asked: list[str] = []

    def told(part: PartKey, kept: KeptPart, copied_from: str | None = None) -> PartTold:
        return PartTold(change="kept", part=part, kept=kept, copied_from=copied_from)

    def place_of(writer: str) -> VolumePlace:
        asked.append(writer)
        return saving.place

    rescue_all(
        place_of,
        "own",
        [told(part_of(5, 0), own), told(part_of(5, 1), other, "other")],
    )
    assert sorted(asked) == ["other", "own"]
    assert [receipt.rank for receipt in saving.written(5)] == [0, 1]
    assert saving.written(5)[0].incarnation == INCARNATION
