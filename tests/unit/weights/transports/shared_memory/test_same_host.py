"""One broadcaster and one receiver of a process that share memory, and what may go wrong there."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync import failpoints
from trainsync.weights.buckets.tensor_stream import schema_of
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.shared_memory.receiving import SharedMemoryReceiver
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY, SegmentGoneError
from trainsync.weights.transports.shared_memory.segment_reader import SegmentReader
from trainsync.weights.transports.shared_memory.segment_store import SegmentStore

DEADLINES = Deadlines(whole=60.0, bucket=20.0, connect=20.0, silence=20.0)
OF_GROUPS = {"joining", "joined"}

Tensors = list[tuple[str, torch.Tensor]]


def weights(version: int) -> Tensors:
    return [("a", torch.full((100,), float(version))), ("b", torch.full((3, 5), version))]


class Pair:
    """One of each."""

    def __init__(self, ours: Path | None, theirs: Path | None) -> None:
        self.sent: list[str] = []
        self.received: list[str] = []
        failpoints.enable(failpoints.SEND, self.sent.append)
        failpoints.enable(failpoints.RECEIVE, self.received.append)
        self.trainer = WeightBroadcaster(
            0,
            "127.0.0.1",
            bucket_size=64,
            deadlines=DEADLINES,
            shared_memory=ours,
        )
        self.explorer = WeightReceiver(
            "e",
            lambda: self.trainer.endpoint,
            deadlines=DEADLINES,
            shared_memory=theirs,
        )
        assert self.trainer.wait_for(1, 20.0)

    def send(self, version: int, tensors: Tensors | None = None) -> BroadcastReport:
        return self.trainer.broadcast(version, lambda: tensors or weights(version))

    def served(self) -> dict[str, torch.Tensor]:
        with self.explorer.reading() as served:
            assert served is not None
            return dict(served.tensors)

    def close(self) -> None:
        self.explorer.close()
        self.trainer.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as name:
        yield Path(name)


@pytest.fixture
def pair(memory: Path) -> Iterator[Pair]:
    pair = Pair(memory, memory)
    yield pair
    pair.close()


def test_the_phases_are_those_of_the_wire_without_a_group(pair: Pair) -> None:
    of_wire = {
        area: [point for point in points if point not in OF_GROUPS]
        for area, points in failpoints.POINTS.items()
    }
    assert pair.send(1).same_host == ("e",)
    assert list(dict.fromkeys(pair.sent)) == of_wire["send"]
    pair.explorer.close()  # "acknowledged" comes after the trainer has heard it
    assert list(dict.fromkeys(pair.received)) == of_wire["receive"]
    assert pair.received.count("bucket") == pair.sent.count("bucket") == 9


@pytest.mark.parametrize("tensors", [[("none", torch.empty(0, 3))], [("a", torch.ones(()))]])
def test_next_to_nothing_is_a_version_too(pair: Pair, tensors: Tensors) -> None:
    for version in (1, 2):
        assert pair.send(version, tensors).same_host == ("e",)
    ((name, expected),) = tensors
    assert torch.equal(pair.served()[name], expected)


def test_the_digest_is_that_of_the_wire(pair: Pair) -> None:
    other = Pair(None, None)
    try:
        assert other.send(1).same_host == ()
        assert pair.send(1).digest == other.send(2, weights(1)).digest
    finally:
        other.close()


def test_bytes_that_are_not_those_that_were_laid_are_never_served(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.send(1)
    genuine = SegmentReader.map

    def damaged(*arguments: Any) -> torch.Tensor:
        data = genuine(*arguments).clone()
        data[7] += 1
        return data

    monkeypatch.setattr(SegmentReader, "map", damaged)
    report = pair.send(2)
    assert report.served == ()
    assert report.lost["e"].startswith("version 2 arrived with xxh3-128:")
    assert pair.explorer.version == 1
    monkeypatch.undo()
    assert pair.trainer.wait_for(1, 20.0)
    assert pair.send(3).same_host == ("e",)


def test_an_explorer_that_cannot_map_says_why_and_takes_the_wire_from_then_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise SharedMemoryError("no more maps")

    monkeypatch.setattr(SegmentReader, "map", refused)
    report = pair.send(1)
    assert report.served == ("e",) or report.lost["e"] == "version 1 is not here: no more maps"
    monkeypatch.undo()
    assert pair.trainer.wait_for(1, 20.0)
    report = pair.send(2)
    assert report.served == ("e",)
    assert report.same_host == ()


@pytest.mark.parametrize("late", ["the next one has begun", "the next one is about to begin"])
def test_an_explorer_that_hears_of_a_version_too_late_takes_the_next_one_this_way_again(
    memory: Path, late: str
) -> None:
    store = SegmentStore(memory, 0)
    schema = schema_of(weights(1))
    receiving = SharedMemoryReceiver(memory)
    segment = store.acquire(schema.total)
    frame = {"version": 1, "bucket_size": 64, "segment": store.share(segment)}
    if late == "the next one has begun":
        store.acquire(schema.total)
    else:
        assert segment.lock()  # what `acquire` does before it gives it another name
    with pytest.raises(SegmentGoneError):
        receiving.begin(frame, schema)
    assert store.proves(receiving.probe({"memory": store.name}))
    store.close()


@pytest.mark.parametrize("seen", ["nothing", "another memory", "no memory is shared"])
def test_an_explorer_without_the_shared_memory_uses_the_wire(memory: Path, seen: str) -> None:
    ours, theirs = memory / "ours", memory / "theirs"
    ours.mkdir()
    theirs.mkdir()
    pair = Pair(ours, None if seen == "no memory is shared" else theirs)
    try:
        if seen == "another memory":  # of a pod with the same name, say
            (folder,) = ours.iterdir()
            (theirs / folder.name).mkdir()
            (theirs / folder.name / "probe").write_text("0" * 32)
        report = pair.send(1)
        assert report.served == ("e",)
        assert report.same_host == ()
    finally:
        pair.close()


def test_a_trainer_without_such_memory_uses_the_wire(memory: Path) -> None:
    pair = Pair(memory / "none", memory)
    try:
        assert pair.send(1).served == ("e",)
    finally:
        pair.close()


def test_an_ended_trainer_leaves_nothing_and_what_is_served_stays(pair: Pair, memory: Path) -> None:
    pair.send(1)
    pair.trainer.close()
    assert list(memory.iterdir()) == []
    assert bool((pair.served()["a"] == 1).all())
