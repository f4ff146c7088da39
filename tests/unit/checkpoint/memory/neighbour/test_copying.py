"""Two processes of a run copy what they keep to one another."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory.kept import KeptShards
from trainsync.checkpoint.memory.neighbour import wire
from trainsync.checkpoint.memory.neighbour.neighbour import Neighbour
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.memory.shared import SharedVolume
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import Participant

from tests.unit.checkpoint.memory.keeping import INCARNATION, digest_of
from tests.waiting import eventually

DATA = b"shard" * 300_000


class Process:
    """A process on a node of its own."""

    def __init__(self, directory: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(env.NODE_NAME, f"node-{rank}")
        memory = directory / f"shm-{rank}"
        memory.mkdir(exist_ok=True)
        run = RunDirectory(directory / "run")
        shared = SharedVolume(run)
        place = MemoryPlace.of_run(memory, 64 << 20, "uid", run.root, copies=1)
        assert place.guests is not None
        self.run, self.place = run, place
        self.guests = place.guests
        self.participant = Participant("model", rank)
        self.neighbour = Neighbour(place.guests, shared, 0, INCARNATION, rank)
        self.shards = KeptShards(place, shared, 0, INCARNATION, self.neighbour)

    def begin(self) -> None:
        """Take copies, before it has kept a file."""
        self.shards.hold()
        self.neighbour.begun()

    def keep(self, step: int, data: bytes = DATA) -> None:
        file = self.shards.begin(step, self.participant, len(data))
        assert file is not None
        file.write(memoryview(data))
        file.seal(digest_of(data))

    def held(self) -> list[int]:
        return sorted(kept.step for kept in self.guests.files() if kept.digest is not None)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    (tmp_path / "run").mkdir()
    made = [Process(tmp_path, rank, monkeypatch) for rank in range(2)]
    made[1].begin()
    monkeypatch.setenv(env.NODE_NAME, "node-0")
    yield made
    for process in made:
        process.neighbour.close()


def test_what_is_kept_here_lies_with_the_partner_soon(pair: list[Process]) -> None:
    first, second = pair
    first.keep(5)
    assert first.neighbour.wait(30)
    (path,) = [second.guests.path(kept) for kept in second.guests.files()]
    assert path.read_bytes() == DATA
    assert first.neighbour.stats.copies == 1
    assert first.neighbour.stats.bytes == len(DATA)


def test_a_copy_goes_to_another_failure_domain_past_a_nearer_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    made = []
    for rank, domain in enumerate(("left", "left", "right", "right")):
        made.append(Process(tmp_path, rank, monkeypatch))
        monkeypatch.setenv(env.FAILURE_DOMAIN, domain)
        made[-1].begin()
    try:
        made[0].keep(5)
        assert made[0].neighbour.wait(30)
        assert [process.held() for process in made] == [[], [], [5], []]
    finally:
        for process in made:
            process.neighbour.close()


def test_a_commit_drops_the_copies_of_what_is_older(pair: list[Process]) -> None:
    first, second = pair
    for step in (5, 6):
        first.keep(step, DATA + bytes([step]))
        assert first.neighbour.wait(30)
    assert second.held() == [5, 6]
    second.neighbour.ended(SaveKind.CHECKPOINT, 6, True)
    assert second.held() == [6]


def test_a_commit_that_is_found_at_the_next_save_drops_older_copies_though_none_are_kept(
    pair: list[Process],
) -> None:
    first, second = pair
    first.keep(5)
    assert first.neighbour.wait(30)
    manifest = first.run.manifest(SaveKind.CHECKPOINT, 6)
    manifest.parent.mkdir()
    manifest.write_text("{}")
    assert second.shards.begin(7, second.participant, second.place.budget + 1) is None
    assert second.held() == []


def test_a_partner_that_is_gone_is_counted_and_the_next_copy_tries_again(
    pair: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    real = wire.connect

    def gone(address: tuple[str, int], seconds: float = 1.0) -> object:
        raise wire.NeighbourError("the node is gone")

    monkeypatch.setattr(wire, "connect", gone)
    first.keep(5)
    assert first.neighbour.wait(30)
    assert (first.neighbour.stats.failures, second.held()) == (1, [])
    monkeypatch.setattr(wire, "connect", real)
    first.keep(6)
    assert first.neighbour.wait(30)
    assert second.held() == [6]


def test_the_newest_file_of_a_part_goes_while_there_is_no_partner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    first = Process(tmp_path, 0, monkeypatch)
    for step in (5, 6, 7):
        first.keep(step, DATA + bytes([step]))
    assert not first.neighbour.wait(0.1)
    second = Process(tmp_path, 1, monkeypatch)
    second.begin()
    assert first.neighbour.wait(60)
    assert second.held() == [7]
    assert first.neighbour.stats.superseded == 2
    for process in (first, second):
        process.neighbour.close()


def test_keeping_does_not_wait_for_a_partner_that_takes_nothing(
    pair: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair
    # Longer than the bound below: a keep that waited for the partner would be seen.
    monkeypatch.setattr(wire, "ask", lambda *_: time.sleep(8))
    began = time.monotonic()
    for step in (5, 6, 7):
        first.keep(step)
    assert time.monotonic() - began < 7
    first.neighbour.close()
    eventually(lambda: first.neighbour.stats.superseded >= 1)
