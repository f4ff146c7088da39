"""What a process keeps: whole files only, within the budget, and only while it is of use."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory import kept as module
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.saves.receipts import Participant

from tests.unit.checkpoint.memory.keeping import INCARNATION, MODEL, Keeping, digest_of

DATA = b"shard" * 1000
CHECKPOINT = SaveKind.CHECKPOINT


@pytest.fixture
def keeping(tmp_path: Path) -> Keeping:
    return Keeping(tmp_path)


@pytest.fixture(autouse=True)
def no_failpoints() -> Iterator[None]:
    yield
    failpoints.disable_all()


def test_what_was_written_lies_there_under_its_digest(keeping: Keeping) -> None:
    file = keeping.shards.begin(5, MODEL, 10)
    assert file is not None
    for start in range(0, len(DATA), 777):
        file.write(memoryview(DATA)[start : start + 777])
    assert keeping.sealed() == []
    file.seal(digest_of(DATA))
    (name,) = keeping.names()
    assert (name.step, name.digest) == (5, digest_of(DATA))
    assert keeping.place.path(name).read_bytes() == DATA
    assert keeping.place.path(name).stat().st_mode & 0o777 == 0o600


def test_what_is_given_up_leaves_nothing(keeping: Keeping) -> None:
    file = keeping.shards.begin(5, MODEL, len(DATA))
    assert file is not None
    file.write(memoryview(DATA))
    file.discard()
    file.write(memoryview(DATA))
    file.seal(digest_of(DATA))
    assert keeping.names() == []


def test_a_commit_drops_what_is_older(keeping: Keeping) -> None:
    for step in (5, 6, 7):
        keeping.keep(step, DATA)
    keeping.shards.ended(CHECKPOINT, 6, True)
    assert keeping.sealed() == [6, 7]


def test_a_commit_that_is_heard_of_late_drops_nothing_newer(keeping: Keeping) -> None:
    for step in (5, 6):
        keeping.keep(step, DATA)
    keeping.shards.ended(CHECKPOINT, 6, True)
    keeping.shards.ended(CHECKPOINT, 5, True)
    assert keeping.sealed() == [6]


def test_an_abort_drops_that_save_alone(keeping: Keeping) -> None:
    for step in (5, 6, 7):
        keeping.keep(step, DATA)
    keeping.shards.ended(CHECKPOINT, 6, False)
    assert keeping.sealed() == [5, 7]


def test_the_end_of_a_state_dict_says_nothing_of_the_checkpoint(keeping: Keeping) -> None:
    for step in (5, 6):
        keeping.keep(step, DATA)
    keeping.shards.ended(SaveKind.STATE_DICT, 6, True)
    keeping.shards.ended(SaveKind.STATE_DICT, 5, False)
    assert keeping.sealed() == [5, 6]


def test_a_step_that_is_saved_again_after_its_abort_is_kept(keeping: Keeping) -> None:
    keeping.keep(5, DATA)
    keeping.shards.ended(CHECKPOINT, 5, False)
    keeping.keep(5, DATA)
    assert keeping.sealed() == [5]


def test_the_next_save_finds_a_commit_that_nothing_told_it_of(keeping: Keeping) -> None:
    for step in (5, 6):
        keeping.keep(step, DATA)
        keeping.commit(step)
    keeping.keep(7, DATA)
    assert keeping.sealed() == [6, 7]


def test_what_is_saved_while_the_storage_is_away_is_kept_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = Keeping(tmp_path, budget=2 * len(DATA))
    keeping.keep(5, DATA)
    keeping.commit(5)
    with monkeypatch.context() as patch:

        def away() -> int | None:
            raise StoreUnavailableError("the bucket is away")

        patch.setattr(keeping.shared, "newest", away)
        for step in (6, 7):
            keeping.keep(step, DATA)
        assert keeping.sealed() == [5, 6]
    keeping.commit(6)
    keeping.keep(8, DATA)
    assert keeping.sealed() == [6, 8]


def test_a_process_that_starts_again_drops_all_but_the_newest_commit(
    keeping: Keeping, tmp_path: Path
) -> None:
    for step in (5, 6):
        keeping.keep(step, DATA)
    keeping.commit(5)
    assert keeping.shards.begin(7, MODEL, 10) is not None  # and is killed
    again = Keeping(tmp_path, attempt=1)
    again.keep(6, DATA)
    assert [(name.step, name.attempt) for name in again.names()] == [(5, 0), (6, 1)]


def test_a_save_beyond_the_budget_is_not_kept_and_the_next_one_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeping = Keeping(tmp_path, budget=2 * len(DATA))
    for step in (5, 6, 7, 8):
        keeping.keep(step, DATA)
    assert keeping.sealed() == [5, 6]
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert f"with a budget of {2 * len(DATA)}" in warned[0].getMessage()
    keeping.shards.ended(CHECKPOINT, 6, True)
    keeping.keep(9, DATA)
    assert keeping.sealed() == [6, 9]


def test_a_caller_that_tries_again_is_warned_only_then_and_older_steps_make_room_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeping = Keeping(tmp_path, budget=2 * len(DATA))
    for step in (5, 6):
        keeping.keep(step, DATA)
    assert keeping.shards.begin(7, MODEL, len(DATA), tries_again=True) is None
    assert not caplog.records
    assert keeping.shards.begin(8, MODEL, len(DATA), tries_again=True) is None
    keeping.commit(6)
    assert keeping.shards.begin(8, MODEL, len(DATA)) is not None
    assert keeping.shards.begin(9, MODEL, len(DATA)) is None
    assert "with a budget of" in caplog.text


def test_ranks_that_begin_together_stay_within_the_budget(tmp_path: Path) -> None:
    ranks = [Keeping(tmp_path, budget=2 * len(DATA)) for _ in range(3)]
    files = [
        rank.shards.begin(5, Participant("model", number), len(DATA))
        for number, rank in enumerate(ranks)
    ]
    assert [file is not None for file in files] == [True, True, False]


def test_a_file_that_grows_beyond_the_budget_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GROWTH", 0)
    keeping = Keeping(tmp_path, budget=3 * len(DATA))
    file = keeping.shards.begin(5, MODEL, 10)
    assert file is not None
    for _ in range(4):
        file.write(memoryview(DATA))
    file.seal(digest_of(4 * DATA))
    assert keeping.names() == []


def test_a_memory_that_is_full_ends_the_keeping_and_nothing_else(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = keeping.shards.begin(5, MODEL, len(DATA))
    assert file is not None
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        file.write(memoryview(DATA))
    assert keeping.names() == []
    file.write(memoryview(DATA))
    file.seal(digest_of(DATA))
    assert keeping.names() == []
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("point", failpoints.POINTS[failpoints.MEMORY])
def test_a_failure_at_any_point_is_no_failure_of_the_save(keeping: Keeping, point: str) -> None:
    def fail(reached: str) -> None:
        if reached == point:
            raise OSError(errno.EIO, "memory is on fire")

    keeping.keep(5, DATA)
    with failpoints.enabled(failpoints.MEMORY, fail):
        keeping.keep(6, DATA)
        keeping.shards.ended(CHECKPOINT, 6, True)
    assert {name.step for name in keeping.names()} <= {5, 6}
    assert all(name.digest for name in keeping.names())
    keeping.keep(7, DATA)
    keeping.shards.ended(CHECKPOINT, 7, True)
    assert keeping.sealed() == [7]


def test_a_later_attempt_takes_the_place_of_one_that_lives_on(
    keeping: Keeping, tmp_path: Path
) -> None:
    old = keeping.shards.begin(5, MODEL, len(DATA))
    assert old is not None
    later = Keeping(tmp_path, attempt=1, incarnation="f" * 16)
    later.keep(5, DATA)
    old.write(memoryview(DATA))
    old.seal(digest_of(DATA))
    keeping.keep(6, DATA)
    assert [(name.step, name.incarnation) for name in keeping.names()] == [
        (5, "f" * 16),
        (6, INCARNATION),
    ]


def test_a_place_that_cannot_be_used_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeping = Keeping(tmp_path)
    keeping.place.directory.parent.mkdir(mode=0o777)
    keeping.place.directory.parent.chmod(0o777)
    assert keeping.shards.begin(5, MODEL, 10) is None
    assert "expected owner" in caplog.text


def test_a_neighbour_that_fails_takes_nothing_from_the_save(
    keeping: Keeping, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def begun(self) -> None:
            raise RuntimeError("can't start new thread")

        def sealed(self, file: module.SealedFile) -> None:
            raise RuntimeError(str(file.step))

        def ended(self, kind: SaveKind, step: int, committed: bool) -> None:
            raise RuntimeError(f"{kind} {step} {committed}")

    shards = module.KeptShards(keeping.place, keeping.shared, 0, INCARNATION, Failing())
    file = shards.begin(5, MODEL, 4)
    assert file is not None
    file.write(memoryview(b"data"))
    assert file.seal(digest_of(b"data"))
    shards.ended(SaveKind.CHECKPOINT, 5, committed=True)
    assert keeping.sealed() == [5]
    assert "can't start new thread" in caplog.text
