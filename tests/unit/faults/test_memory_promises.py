"""Each promise of checkpoints in memory, when it is broken, is noticed."""

import os
import signal
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.dist.agreement import Agreement
from trainsync.storage import atomic
from trainsync.storage.saves.receipts import Participant

from tests.faults.memory import promises
from tests.faults.memory.promises import Pod, Report, Tier
from tests.faults.memory.rank import killing_in_round
from tests.faults.processes import BrokenError
from tests.unit.checkpoint.memory.keeping import Keeping, digest_of, manifest_of
from tests.unit.checkpoint.memory.neighbour.test_fetching import DATA, PATHS

SAVED = manifest_of(dict(zip(PATHS, DATA, strict=True)))
SIZES = [len(data) for data in DATA]
FULL = Pod(frozenset(digest_of(data) for data in DATA))
EMPTY = Pod(frozenset())


def check(reports: list[Report], first: Pod, other: Pod, copies: int = 1) -> None:
    promises.check_tiers(SAVED, reports, {0: first, 1: other}, [0, 1], copies)


def own(rank: int) -> Report:
    return Report(5, memory=SIZES[rank])


def fetched(rank: int) -> Report:
    return Report(5, memory=SIZES[rank], neighbour=SIZES[rank])


def read(rank: int) -> Report:
    return Report(5, volume=SIZES[rank])


def test_the_nearest_tier_that_has_a_file_whole_must_serve_it() -> None:
    check([own(0), own(1)], FULL, FULL)
    check([fetched(0), own(1)], EMPTY, FULL)
    check([read(0), own(1)], EMPTY, FULL, copies=0)
    check([read(0), read(1)], EMPTY, EMPTY)


@pytest.mark.parametrize("first", [fetched(0), read(0), Report(5)])
def test_a_rank_that_passed_its_own_memory_over_is_noticed(first: Report) -> None:
    with pytest.raises(BrokenError, match="the nearest that had them whole"):
        check([first, own(1)], FULL, FULL)


@pytest.mark.parametrize("first", [own(0), read(0)])
def test_a_rank_that_passed_its_neighbour_over_is_noticed(first: Report) -> None:
    with pytest.raises(BrokenError, match="the nearest that had them whole"):
        check([first, own(1)], EMPTY, FULL)


def test_bytes_from_memory_that_has_none_are_noticed() -> None:
    with pytest.raises(BrokenError, match="the nearest that had them whole"):
        check([own(0), own(1)], EMPTY, EMPTY)


@pytest.mark.parametrize(
    ("report", "tiers"),
    [
        (read(0), (Tier.MEMORY,)),
        (fetched(0), (Tier.MEMORY,)),
        (own(0), (Tier.NEIGHBOUR,)),
        (Report(5, memory=9, volume=1), (Tier.MEMORY, Tier.NEIGHBOUR)),
        (Report(5), (Tier.VOLUME,)),
    ],
)
def test_another_tier_than_the_fault_leaves_is_noticed(
    report: Report, tiers: tuple[Tier, ...]
) -> None:
    with pytest.raises(BrokenError, match="rank 0 had to read"):
        promises.check_tier(0, report, tiers)
    promises.check_tier(0, own(0), (Tier.MEMORY,))
    promises.check_tier(0, fetched(0), (Tier.MEMORY, Tier.NEIGHBOUR))


def test_a_bit_or_a_step_that_was_not_saved_is_noticed() -> None:
    saved = {"weight": torch.ones(3), "bias": torch.zeros(2)}
    promises.check_state(0, dict(saved), saved, {"whose": [0, 5, 0]}, {"whose": [0, 5, 0]})
    with pytest.raises(BrokenError, match="bias of rank 0"):
        mixed = saved | {"bias": torch.tensor([0.0, 1e-30])}
        promises.check_state(0, mixed, saved, {"whose": [0, 5, 0]}, {"whose": [0, 5, 0]})
    with pytest.raises(BrokenError, match="goes on with"):
        promises.check_state(0, dict(saved), saved, {"whose": [0, 4, 0]}, {"whose": [0, 5, 0]})


def test_a_training_that_is_held_up_is_noticed() -> None:
    promises.check_answered("a save", promises.SLOW_SECONDS)
    with pytest.raises(BrokenError, match="a save took"):
        promises.check_answered("a save", promises.SLOW_SECONDS + 1)


@pytest.fixture
def keeping(tmp_path: Path) -> Keeping:
    made = Keeping(tmp_path)
    made.keep(5, b"bytes")
    promises.check_left([made.place], [5])
    return made


def test_files_of_older_steps_that_are_left_are_noticed(keeping: Keeping) -> None:
    with pytest.raises(BrokenError, match="is left in memory"):
        promises.check_left([keeping.place], [6])


def test_one_file_of_a_part_may_wait_for_its_next_save(keeping: Keeping, tmp_path: Path) -> None:
    for step in (6, 7):
        keeping.keep(step, b"bytes")
        keeping.shards.ended(SaveKind.CHECKPOINT, step, committed=True)
    (spare,) = keeping.spares()
    promises.check_left([keeping.place], [7])
    other = spare.name[:-16] + "0" * 16
    (keeping.place.directory / other).touch()
    with pytest.raises(BrokenError, match=r"spare-.* is left in memory"):
        promises.check_left([keeping.place], [7])
    keeping.place.path(spare).unlink()
    promises.check_left([keeping.place], [7])
    later = Keeping(tmp_path, attempt=1)
    later.keep(8, b"bytes")
    keeping.place.path(spare).touch()
    with pytest.raises(BrokenError, match=r"spare-.* is left in memory"):
        promises.check_left([keeping.place], [7, 8])


def test_files_that_are_half_written_or_strange_are_noticed(keeping: Keeping) -> None:
    file = keeping.shards.begin(5, Participant("model", 1), 10)
    assert file is not None
    with pytest.raises(BrokenError, match="is left in memory"):
        promises.check_left([keeping.place], [5])
    file.discard()
    (keeping.place.directory / "strange").touch()
    with pytest.raises(BrokenError, match="strange is left in memory"):
        promises.check_left([keeping.place], [5])


def test_a_neighbours_files_that_are_left_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    place = MemoryPlace.of_run(tmp_path / "shm", 1 << 20, "uid", tmp_path / "run", copies=1)
    assert place.guests is not None
    place.make()
    place.guests.directory.mkdir(mode=0o700)
    promises.check_left([place], [5])
    (place.guests.directory / "strange").touch()
    with pytest.raises(BrokenError, match="strange is left in memory"):
        promises.check_left([place], [5])


def test_what_lies_damaged_in_memory_is_noticed_and_does_not_count_as_there(
    keeping: Keeping,
) -> None:
    assert Pod.look(keeping.place) == Pod(frozenset({digest_of(b"bytes")}))
    (kept,) = keeping.names()
    keeping.place.path(kept).write_bytes(b"bytez")
    assert Pod.look(keeping.place) == EMPTY
    with pytest.raises(BrokenError, match="has other bytes than its name says"):
        promises.check_left([keeping.place], [5])


def test_temporary_files_that_are_left_are_noticed(keeping: Keeping) -> None:
    keeping.run.root.mkdir()
    promises.check_no_temporaries(keeping.run)
    atomic.temporary_name(keeping.run.root / "memory.key").touch()
    with pytest.raises(BrokenError, match="temporary files are left"):
        promises.check_no_temporaries(keeping.run)


def test_a_process_that_is_left_is_noticed() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the test ends
        os._exit(0)
    os.close(reader)
    try:
        with pytest.raises(BrokenError, match=rf"processes are left: .*\b{child}\b"):
            promises.check_no_processes(seconds=0.1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writer)


def test_a_torn_commit_is_noticed(keeping: Keeping) -> None:
    with pytest.raises(BrokenError, match="committed step 5 is torn"):
        promises.check_whole(keeping.run, SAVED)


@pytest.mark.parametrize("after", [False, True])
def test_a_strike_in_a_round_comes_before_or_after_the_ranks_own_work(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agreement, "do", Agreement.do)  # put back at the end
    seen: list[str] = []

    def work() -> str:
        seen.append("work")
        return ""

    killing_in_round("reading", after=after, strike=lambda: seen.append("strike"))()
    ranks = Agreement(None, 0, 1, 60)
    ranks.do("planning to load", work)
    ranks.do("reading", work)
    assert seen == (["work", "work", "strike"] if after else ["work", "strike"])
