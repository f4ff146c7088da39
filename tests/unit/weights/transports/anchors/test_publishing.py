"""Publisher and reader over a store in memory; tests/store has them on a real server."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.weights.counts import TransferKind
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.errors import (
    SupersededTrainerError,
    WeightsLateError,
    WeightsReplacedError,
)
from trainsync.weights.transports.anchors.index import INDEX, Owner, decode_index
from trainsync.weights.transports.anchors.publisher import AnchorPublisher
from trainsync.weights.transports.anchors.reader import AnchorReader
from trainsync.weights.transports.anchors.retention import Retention
from trainsync.weights.transports.anchors.source import StoreSource
from trainsync.weights.transports.base import Weights
from trainsync.weights.versions import Published

from tests.store.processes.publishing import Named, weights

FIRST, SECOND = Owner("run-uid", 1, "aaaa"), Owner("run-uid", 2, "bbbb")


@pytest.fixture
def bucket() -> ObjectBucket:
    assert prepare(600.0, compact=True)  # as trainers do before their first version
    return ObjectBucket(MemoryStore(), "memory")


@pytest.fixture
def explorer(bucket: ObjectBucket) -> Iterator[AnchorReader]:
    reader = AnchorReader(bucket)
    yield reader
    reader.close()


def publish(trainer: AnchorPublisher, first: int, last: int, attempt: int = 1) -> None:
    for version in range(first, last + 1):
        trainer.publish(version, lambda v=version: weights(v, attempt), 60.0)  # type: ignore[misc]


def take(explorer: AnchorReader) -> Weights:
    row = explorer.newest()
    assert row is not None
    return explorer.fetch(row.weight_version, row.digest, 60.0)


def test_an_index_that_is_not_moved_in_time_keeps_no_caller_past_its_deadline(
    bucket: ObjectBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = AnchorPublisher(bucket, FIRST, anchor_every=1)
    publish(trainer, 1, 1)
    away, done = threading.Event(), threading.Event()
    replace = bucket.replace

    def slow(key: str, data: bytes, old: Any) -> None:
        newest = decode_index(data).newest
        if newest is not None and newest.weight_version == 2 and newest.anchor is not None:
            away.set()  # the anchor's move, behind the caller
            assert done.wait(60.0)
        replace(key, data, old)

    monkeypatch.setattr(bucket, "replace", slow)
    publish(trainer, 2, 2)
    assert away.wait(60.0)
    started = time.monotonic()
    with pytest.raises(WeightsLateError, match="the whole of version 2 is still on its way"):
        trainer.publish(3, lambda: weights(3), 0.2)
    assert time.monotonic() - started < 5.0
    done.set()
    publish(trainer, 4, 4)
    assert all(row.anchor is not None for row in trainer.index.versions[:2])
    trainer.close()


def test_a_copy_that_is_late_is_a_version_that_is_late(bucket: ObjectBucket) -> None:
    trainer = AnchorPublisher(bucket, FIRST)
    publish(trainer, 1, 1)

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(0.3)  # past the deadline, as a gather that is slow
        yield from weights(2)

    with pytest.raises(WeightsLateError, match="version 2"):
        trainer.publish(2, slow, 0.0)
    publish(trainer, 3, 3)
    trainer.close()


def test_an_explorer_goes_on_after_a_copy_ahead_that_failed(
    bucket: ObjectBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = AnchorPublisher(bucket, FIRST)
    source = StoreSource(bucket)

    def fetch() -> Weights:
        row = trainer.index.newest
        assert row is not None
        return source.fetch(Published.stored(row.weight_version, row.digest, row.bytes), 60.0)

    publish(trainer, 1, 1)
    first = fetch()

    def fail() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(source._reader, "make_ready", fail)
    source.copied(first)
    publish(trainer, 2, 2)
    assert same(fetch(), weights(2))
    source.close()
    trainer.close()


def same(taken: Weights, expected: Named) -> bool:
    return all(torch.equal(taken.state_dict[name], tensor) for name, tensor in expected)


def test_an_explorer_folds_what_it_missed_and_a_new_one_begins_at_an_anchor(
    bucket: ObjectBucket, explorer: AnchorReader
) -> None:
    trainer = AnchorPublisher(bucket, FIRST, anchor_every=3)
    publish(trainer, 1, 1)
    assert same(take(explorer), weights(1))
    publish(trainer, 2, 6)
    taken = take(explorer)
    assert same(taken, weights(6))
    assert list(taken.taken) == [TransferKind.DELTA]
    fresh = AnchorReader(bucket)
    assert same(take(fresh), weights(6))
    fresh.close()
    trainer.close()


def test_a_later_attempt_takes_over_and_goes_back_behind_what_was_published(
    bucket: ObjectBucket, explorer: AnchorReader
) -> None:
    first = AnchorPublisher(bucket, FIRST)
    publish(first, 1, 4)
    take(explorer)
    second = AnchorPublisher(bucket, SECOND)
    publish(second, 3, 4, attempt=2)
    assert [row.weight_version for row in second.index.versions] == [1, 2, 3, 4]
    assert same(take(explorer), weights(4, attempt=2))
    with pytest.raises(SupersededTrainerError, match="held by attempt 2"):
        publish(first, 5, 5)
    assert same(take(explorer), weights(4, attempt=2))
    first.close()
    second.close()


def test_objects_of_versions_that_are_gone_are_removed_after_their_grace(
    bucket: ObjectBucket,
) -> None:
    now = [0.0]
    rule = Retention(versions=1, seconds=0.0, grace_seconds=60.0)
    trainer = AnchorPublisher(bucket, FIRST, retention=rule, anchor_every=1, clock=lambda: now[0])
    publish(trainer, 1, 4)
    before = {info.key for info in bucket.below("weights")}
    assert len(before) > len({one.key for r in trainer.index.versions for one in r.objects}) + 1
    now[0] = 61.0
    publish(trainer, 5, 6)
    trainer.close()
    left = {info.key for info in bucket.below("weights")} - {INDEX}
    assert left == trainer.index.keys
    assert not any(key.rpartition("/")[2].startswith(("1-", "2-")) for key in left)


def test_a_proof_goes_with_its_version(bucket: ObjectBucket) -> None:
    now = [1000.0]
    rule = Retention(versions=2, seconds=0.0, grace_seconds=60.0)
    trainer = AnchorPublisher(bucket, FIRST, retention=rule, anchor_every=1, clock=lambda: now[0])
    for version in range(1, 7):
        proof = f"proof {version}".encode()
        trainer.publish(version, lambda v=version: weights(v), 60.0, proof)  # type: ignore[misc]
    reader = AnchorReader(bucket)
    newest = reader.newest()
    assert newest is not None
    assert reader.proof(6, newest.digest, 60.0) == b"proof 6"
    now[0] += 61.0
    publish(trainer, 7, 7)  # without one
    newest = reader.newest()
    assert newest is not None
    assert reader.proof(7, newest.digest, 60.0) is None
    trainer.close()
    there = {info.key for info in bucket.below("weights")} - {INDEX}
    assert there == trainer.index.keys
    assert not any("/1-aaaa/1-" in key for key in there)
    trainer = AnchorPublisher(bucket, SECOND)
    assert {info.key for info in bucket.below("weights")} - {INDEX} == there
    with pytest.raises(WeightsReplacedError, match="version 1 is not in memory any more"):
        reader.proof(1, newest.digest, 60.0)
    trainer.close()
    reader.close()
