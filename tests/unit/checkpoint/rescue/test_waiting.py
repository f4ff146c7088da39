"""A restart waits for what is finished from memory, and for nothing else."""

import errno
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.rescue.waiting import await_rescue
from trainsync.checkpoint.save.places.volume import VolumeRecords
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import ParticipantFailure, Rescue, SaveOutcome

from tests.unit.checkpoint.memory.keeping import INCARNATION
from tests.unit.checkpoint.rescue.rescues import CHECKPOINT, Saving, receipt_of


class Waiting:
    """A wait by a clock of its own; ``at`` is done once so many seconds have gone by."""

    def __init__(self, directory: Path) -> None:
        self.saving = Saving(directory)
        self.now = 0.0
        self.at: dict[float, list[tuple[int, int]]] = {}
        self.copies = False
        self.answers = False
        """Whether rank 1 has a neighbour with a copy of step 5."""

    def wait(self) -> float:
        """How long it took."""
        began = self.now
        await_rescue(
            [self.saving.place], copies=self.copies, clock=lambda: self.now, sleep=self._sleep
        )
        return self.now - began

    def say(self, step: int, rank: int, *, kept: bool) -> None:
        rescue = Rescue(component="model", rank=rank, kept=kept)
        self.saving.place.save(CHECKPOINT, step).write_rescue(rescue)

    def write(self, step: int, rank: int) -> None:
        receipts.write_receipt(self.saving.save(step), receipt_of(step, rank))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.answers and self.saving.place.save(CHECKPOINT, 5).are_copies_wanted():
            self.say(5, 1, kept=True)
        for due in [when for when in self.at if when <= self.now]:
            for step, rank in self.at.pop(due):
                self.write(step, rank)


@pytest.fixture
def waiting(tmp_path: Path) -> Waiting:
    return Waiting(tmp_path)


def test_a_run_without_a_save_in_flight_restarts_at_once(waiting: Waiting) -> None:
    assert waiting.wait() == 0.0
    waiting.saving.register(5)
    receipts.write_outcome(
        waiting.saving.save(5), SaveOutcome(kind=CHECKPOINT, step=5, manifest_digest="d")
    )
    assert waiting.wait() == 0.0


def test_a_save_with_all_parts_is_not_waited_for(waiting: Waiting) -> None:
    waiting.saving.register(5)
    waiting.write(5, 0)
    waiting.write(5, 1)
    assert waiting.wait() == 0.0


def test_parts_on_their_way_from_memory_are_waited_for(waiting: Waiting) -> None:
    waiting.saving.register(5)
    waiting.say(5, 0, kept=True)
    waiting.say(5, 1, kept=True)
    waiting.at = {3.0: [(5, 0)], 20.0: [(5, 1)]}
    assert 20.0 <= waiting.wait() < 21.0


def test_a_part_that_is_lost_is_not_waited_for_but_an_older_save_is(waiting: Waiting) -> None:
    for step in (5, 6):
        waiting.saving.register(step)
    waiting.say(6, 0, kept=True)
    waiting.say(6, 1, kept=False)
    waiting.say(5, 0, kept=True)
    waiting.write(5, 1)
    waiting.at = {3.0: [(5, 0)]}
    assert 3.0 <= waiting.wait() < 4.0


def test_a_save_of_which_a_part_failed_is_not_waited_for_but_an_older_one_is(
    waiting: Waiting,
) -> None:
    for step in (5, 6):
        waiting.saving.register(step)
    waiting.write(6, 0)
    receipts.write_failure(
        waiting.saving.save(6),
        ParticipantFailure(
            kind=CHECKPOINT,
            step=6,
            attempt=0,
            incarnation=INCARNATION,
            component="model",
            rank=1,
            error="No space left on device",
        ),
    )
    waiting.say(5, 0, kept=True)
    waiting.write(5, 1)
    waiting.at = {3.0: [(5, 0)]}
    assert 3.0 <= waiting.wait() < 4.0


def test_a_process_of_which_nothing_is_left_costs_three_seconds_and_asks_for_nothing(
    waiting: Waiting,
) -> None:
    waiting.saving.register(5)
    waiting.say(5, 0, kept=True)
    assert 3.0 <= waiting.wait() < 4.0
    assert not waiting.saving.place.save(CHECKPOINT, 5).are_copies_wanted()


def test_where_there_are_copies_these_are_asked_for_which_costs_four_seconds(
    waiting: Waiting,
) -> None:
    waiting.copies = True
    for step in (4, 5, 6):
        waiting.saving.register(step)
    waiting.say(6, 0, kept=True)
    waiting.say(5, 0, kept=True)
    assert 4.0 <= waiting.wait() < 5.0
    places = [waiting.saving.place.save(CHECKPOINT, step) for step in (4, 5, 6)]
    assert all(place.are_copies_wanted() for place in places)


def test_where_all_is_heard_of_no_copies_are_asked_for(waiting: Waiting) -> None:
    waiting.copies = True
    waiting.saving.register(5)
    for rank in (0, 1):
        waiting.say(5, rank, kept=True)
    waiting.at = {20.0: [(5, 0), (5, 1)]}
    assert 20.0 <= waiting.wait() < 21.0
    assert not waiting.saving.place.save(CHECKPOINT, 5).are_copies_wanted()


def test_copies_that_cannot_be_asked_for_do_not_end_the_wait(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(VolumeRecords, "want_copies", full)
    waiting.copies = True
    waiting.saving.register(5)
    waiting.at = {2.5: [(5, 0), (5, 1)]}
    assert 2.5 <= waiting.wait() < 3.0
    assert "are not asked for" in caplog.text


def test_copies_of_a_state_dict_are_asked_for_together_with_those_of_its_checkpoint(
    waiting: Waiting,
) -> None:
    place = waiting.saving.place.save(SaveKind.STATE_DICT, 5)
    waiting.saving.register(5)
    waiting.saving.register(5, SaveKind.STATE_DICT)
    asked_after = []

    def sleep(seconds: float) -> None:
        waiting.now += seconds
        if place.are_copies_wanted() and not asked_after:
            asked_after.append(waiting.now)

    await_rescue([waiting.saving.place], copies=True, clock=lambda: waiting.now, sleep=sleep)
    assert 1.5 <= asked_after[0] < 3.0


def test_a_part_that_is_written_from_a_copy_is_waited_for(waiting: Waiting) -> None:
    waiting.saving.register(5)
    waiting.say(5, 0, kept=True)
    waiting.copies = waiting.answers = True
    waiting.at = {20.0: [(5, 0), (5, 1)]}
    assert 20.0 <= waiting.wait() < 21.0


def test_a_part_that_never_comes_costs_a_minute_in_all(waiting: Waiting) -> None:
    for step in (4, 5, 6):
        waiting.saving.register(step)
        for rank in (0, 1):
            waiting.say(step, rank, kept=True)
    assert 60.0 <= waiting.wait() < 62.0


def test_records_that_cannot_be_read_do_not_hold_the_restart_up(waiting: Waiting) -> None:
    waiting.saving.register(5)
    waiting.saving.save(5).registration.write_text("{")
    assert waiting.wait() == 0.0
