"""`WeightReceiver.fetch`: broadcast weights are handed out once they are announced, never mixed."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.buckets.tensor_stream import Description
from trainsync.weights.errors import (
    DigestMismatchError,
    WeightsLateError,
    WeightsReplacedError,
)
from trainsync.weights.explorer.engine_calls import give
from trainsync.weights.transports.base import meta_of
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.versions import Published, VersionMeta

from tests.waiting import eventually

DEADLINES = Deadlines(whole=30.0, bucket=10.0, connect=10.0, silence=10.0)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((100,), float(version))), ("b", torch.full((3, 5), version))]


class Pair:
    """A trainer, and an explorer's source in the same process; its weights take the wire."""

    def __init__(self) -> None:
        self.trainer = WeightBroadcaster(
            0, "127.0.0.1", bucket_size=256, deadlines=DEADLINES, shared_memory=None
        )
        self.source = WeightReceiver("e", lambda: self.trainer.endpoint, deadlines=DEADLINES)
        assert self.trainer.wait_for(1, 10.0)

    def send(self, version: int) -> Published:
        report = self.trainer.broadcast(version, lambda: weights(version))
        assert report.served == ("e",)
        return announced(report)


def announced(report: BroadcastReport, digest: str | None = None) -> Published:
    meta = VersionMeta(report.version, digest or str(report.digest), (), "nccl", report.bytes)
    return Published(meta)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.source.close()
    pair.trainer.close()


def test_what_is_announced_is_handed_out_whole(pair: Pair) -> None:
    for version in (1, 2):
        got = pair.source.fetch(pair.send(version), 10.0)
        assert got.version == version
        for name, tensor in weights(version):
            assert torch.equal(got.state_dict[name], tensor)


def test_it_is_ready_while_it_is_connected_and_tells_of_both(pair: Pair) -> None:
    told = threading.Event()
    pair.source.when_ready(told.set)
    assert told.is_set(), "it may have become ready before it was asked to tell"
    # The trainer may know of it before it has read the trainer's welcome.
    eventually(lambda: pair.source.ready)
    told.clear()
    pair.trainer.close()
    assert told.wait(10.0)
    eventually(lambda: not pair.source.ready)


def test_bytes_that_do_not_come_are_late_and_it_says_why(pair: Pair) -> None:
    pair.send(1)
    coming = Published(VersionMeta(2, "d", (), "nccl", 460))
    with pytest.raises(WeightsLateError, match=r"no version after 1 came to e within 0\.05 s"):
        pair.source.fetch(coming, 0.05)


def test_of_two_versions_that_came_before_their_announcements_only_the_newer_is_to_be_had(
    pair: Pair,
) -> None:
    older, newer = pair.send(1), pair.send(2)
    with pytest.raises(WeightsReplacedError, match="a newer version than 1 was received already"):
        pair.source.fetch(older, 1.0)
    assert pair.source.fetch(newer, 1.0).version == 2


def test_bytes_other_than_those_that_were_announced_are_refused(pair: Pair) -> None:
    report = pair.trainer.broadcast(1, lambda: weights(1))
    with pytest.raises(DigestMismatchError, match=f"version 1 was received with {report.digest}"):
        pair.source.fetch(announced(report, "xxh3-128:other"), 1.0)


def test_what_was_handed_out_stays_as_it_is_until_it_is_released(pair: Pair) -> None:
    first = pair.source.fetch(pair.send(1), 10.0)
    kept = first.state_dict["a"]
    pair.send(2)
    pair.send(3)  # into new memory: the first is still read
    assert kept.unique().tolist() == [1.0]


def test_what_was_released_is_memory_for_the_next_but_one(pair: Pair) -> None:
    places = []
    for version in (1, 2, 3):
        got = pair.source.fetch(pair.send(version), 10.0)
        places.append(got.state_dict["a"].data_ptr())
        pair.source.release()
    assert places[0] == places[2] != places[1]


def test_a_version_that_a_resumed_trainer_trains_again_is_awaited_not_refused() -> None:
    trainers = [
        WeightBroadcaster(attempt, "127.0.0.1", bucket_size=256, deadlines=DEADLINES)
        for attempt in (0, 1)
    ]
    source = WeightReceiver("e", lambda: trainers[0].endpoint, deadlines=DEADLINES)
    try:
        assert trainers[0].wait_for(1, 10.0)
        former = announced(trainers[0].broadcast(5, lambda: weights(5)))
        assert source.fetch(former, 10.0).version == 5
        source.release()
        trainers.pop(0).close()
        assert trainers[0].wait_for(1, 10.0)
        report = trainers[0].broadcast(5, lambda: weights(55))
        with pytest.raises(WeightsLateError, match="version 5 was trained again, by attempt 1"):
            source.fetch(former, 1.0)
        got = source.fetch(announced(report), 1.0)
        assert torch.equal(got.state_dict["a"], weights(55)[0][1])
        with pytest.raises(DigestMismatchError):  # this attempt's own announcements are told apart
            source.fetch(announced(report, "xxh3-128:other"), 1.0)
    finally:
        source.close()
        for trainer in trainers:
            trainer.close()


def test_what_an_engine_keeps_is_never_written_to_until_it_keeps_another_version(
    pair: Pair,
) -> None:
    kept = pair.source.fetch(pair.send(1), 10.0)
    assert kept.keepable
    pair.source.keep()
    pair.source.copied(kept)
    for version in (2, 3, 4):  # more than there are sets
        coming = pair.send(version)
        for name, tensor in weights(1):
            assert torch.equal(kept.state_dict[name], tensor)
    later = pair.source.fetch(coming, 10.0)
    pair.source.keep()
    pair.source.copied(later)
    places = {later.state_dict["a"].data_ptr()}
    for version in range(5, 11):
        later = pair.source.fetch(pair.send(version), 10.0)
        pair.source.keep()
        pair.source.copied(later)
        places.add(later.state_dict["a"].data_ptr())
    assert len(places) <= 3, "one is kept, one comes, and one may have been there before"


def test_what_was_copied_is_gone_when_the_next_version_breaks_off_and_never_half_of_it(
    pair: Pair,
) -> None:
    first = pair.send(1)
    got = pair.source.fetch(first, 10.0)
    place = got.state_dict["a"].data_ptr()
    pair.source.release()
    pair.source.copied(got)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        given = iter(weights(2))
        yield next(given)
        raise MemoryError("no memory")

    with pytest.raises(MemoryError):
        pair.trainer.broadcast(2, breaks_off, describe=described)
    with pytest.raises(WeightsReplacedError, match="its memory takes the next one"):
        pair.source.fetch(first, 10.0)
    later = pair.source.fetch(pair.send(3), 10.0)
    assert later.state_dict["a"].data_ptr() == place, "one set is enough"
    for name, tensor in weights(3):
        assert torch.equal(later.state_dict[name], tensor)


def described() -> Description:
    metas = tuple(meta_of(*named) for named in weights(0))
    return Description(StreamSchema(metas), torch.device("cpu"))


class Engine:
    """Notes by which of its two methods it was given a version."""

    def __init__(self, *, keeps_weights: bool) -> None:
        self.keeps_weights = keeps_weights
        self.calls: list[str] = []

    def begin_update(self, version: int) -> None:
        pass

    def load_weights(self, weights: object) -> None:
        self.calls.append("load")

    def keep_weights(self, weights: object) -> None:
        self.calls.append("keep")


@pytest.mark.parametrize(
    ("keeps_weights", "keepable", "called"),
    [(True, True, "keep"), (True, False, "load"), (False, True, "load")],
)
def test_an_engine_keeps_weights_where_it_can_and_they_may_be_kept(
    keeps_weights: bool, keepable: bool, called: str, pair: Pair
) -> None:
    engine = Engine(keeps_weights=keeps_weights)
    got = pair.source.fetch(pair.send(1), 10.0)
    give(pair.source, engine, replace(got, keepable=keepable))
    assert engine.calls == [called]
