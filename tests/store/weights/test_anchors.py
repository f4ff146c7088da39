"""Weights through a real S3 server: what an explorer has is what a trainer published, or nothing;
no deposed trainer publishes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from trainsync.failpoints import POINTS, PUBLISH, enabled
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreRefusedError, StoreUnavailableError
from trainsync.storage.saves.incarnations import successor
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import (
    DigestMismatchError,
    SchemaMismatchError,
    StaleVersionError,
    SupersededTrainerError,
    WeightsLateError,
    WeightsReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.anchors.index import INDEX, Owner, VersionRow, read_index
from trainsync.weights.transports.anchors.publisher import AnchorPublisher
from trainsync.weights.transports.anchors.reader import AnchorReader
from trainsync.weights.transports.anchors.retention import Retention
from trainsync.weights.transports.base import Weights

from tests.store.conftest import FAST, Place
from tests.store.processes.forked import run_killed
from tests.store.processes.publishing import ANCHOR_EVERY, Named, weights
from tests.store.servers.fault_proxy import Fault
from tests.store.servers.server import Server

FIRST = Owner("run-uid", 1, "aaaa0000")
SECOND = Owner("run-uid", 2, "bbbb")
READER = "AKIAREADERREADERREAD"
QUICK = replace(FAST, retries=0, retry_seconds=0.5, call_seconds=3.0)


@pytest.fixture
def trainer(place: Place) -> Iterator[AnchorPublisher]:
    publisher = AnchorPublisher(place.open(), FIRST, anchor_every=ANCHOR_EVERY)
    yield publisher
    publisher.close()


@pytest.fixture
def explorer(place: Place) -> Iterator[AnchorReader]:
    reader = AnchorReader(place.open())
    yield reader
    reader.close()


def publish(trainer: AnchorPublisher, first: int, last: int, attempt: int = 1) -> None:
    for version in range(first, last + 1):
        trainer.publish(version, lambda v=version: weights(v, attempt), 60.0)  # type: ignore[misc]


def take(explorer: AnchorReader, row: VersionRow | None = None) -> Weights:
    row = explorer.newest() if row is None else row
    assert row is not None
    return explorer.fetch(row.weight_version, row.digest, 60.0)


def same(taken: Weights, expected: Named) -> bool:
    return list(taken.state_dict) == [name for name, _ in expected] and all(
        torch.equal(taken.state_dict[name], tensor) for name, tensor in expected
    )


def row_of(place: Place, version: int) -> VersionRow:
    index = read_index(place.open())
    assert index is not None
    return next(row for row in index.versions if row.weight_version == version)


def test_an_explorer_follows_by_deltas_and_folds_five_that_it_missed(
    trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 1)
    first = take(explorer)
    assert same(first, weights(1))
    assert list(first.taken) == [TransferKind.WHOLE]
    publish(trainer, 2, 2)
    assert list(take(explorer).taken) == [TransferKind.DELTA]
    publish(trainer, 3, 7)
    folded = take(explorer)
    assert folded.version == 7
    assert same(folded, weights(7))
    assert list(folded.taken) == [TransferKind.DELTA]
    assert folded.bytes < first.bytes / 20


def test_it_serves_one_version_unchanged_while_it_stages_the_next(
    trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 1)
    take(explorer)
    explorer.make_ready()
    served = explorer.served
    assert served is not None
    publish(trainer, 2, 2)
    assert same(take(explorer), weights(2))
    assert all(torch.equal(served.tensors[name], tensor) for name, tensor in weights(1))


def test_a_new_explorer_begins_at_the_nearest_anchor(
    trainer: AnchorPublisher, place: Place, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 6)
    anchors = [row.weight_version for row in trainer.index.versions if row.anchor is not None]
    assert anchors == [1, 4]
    taken = take(explorer)
    assert same(taken, weights(6))
    fetched = [path for method, path in place.proxy.asked if method == "GET" and "weights/" in path]
    assert {path.rpartition("/")[2].split("-")[0] for path in fetched if "INDEX" not in path} == {
        "4",
        "5",
        "6",
    }


def test_a_model_of_several_parts_goes_through(place: Place) -> None:
    large = [("w", torch.randn(3_000_000))]
    reader = AnchorReader(place.open())
    trainer = AnchorPublisher(place.open(), FIRST)
    trainer.publish(1, lambda: large, 60.0)
    assert same(take(reader), large)
    large[0][1].add_(1.0)
    stored = trainer.publish(2, lambda: large, 60.0)
    assert not stored.delta, "too much has changed"
    assert same(take(reader), large)
    trainer.close()
    reader.close()


def test_to_read_one_right_suffices_and_with_that_alone_nothing_is_published(
    server: Server, place: Place, trainer: AnchorPublisher
) -> None:
    server.add_user(READER, "readers-secret")
    policy: dict[str, Any] = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"AWS": [READER]},
                "Action": ["s3:GetObject"],
                "Resource": [f"arn:aws:s3:::{place.name}/runs/a/weights/*"],
            }
        ],
    }
    server.set_policy(place.name, policy)
    publish(trainer, 1, 5)
    credentials = {"access_key_id": READER, "secret_access_key": "readers-secret"}
    bucket = place.open(credentials=credentials)
    reader = AnchorReader(bucket)
    assert same(take(reader), weights(5))
    reader.close()
    with pytest.raises(StoreRefusedError, match="access is denied"):
        AnchorPublisher(bucket, SECOND)
    publish(trainer, 6, 6)


def kill_at(place: Place, point: str, count: int) -> None:
    run_killed("tests.store.processes.publishing", place.url(), 1, "aaaa", 1, 9, point, count)


@pytest.mark.parametrize(
    ("point", "count", "newest"),
    [("claimed", 1, None), ("object", 1, None), ("object", 3, 2), ("indexed", 3, 3),
     ("anchor", 1, 4)],
)  # fmt: skip
def test_a_trainer_that_is_killed_leaves_whole_versions_and_the_next_attempt_goes_on(
    place: Place, explorer: AnchorReader, point: str, count: int, newest: int | None
) -> None:
    assert point in POINTS[PUBLISH]
    kill_at(place, point, count)
    there = explorer.newest()
    assert (None if there is None else there.weight_version) == newest
    if there is not None:
        assert same(take(explorer), weights(there.weight_version))
    trainer = AnchorPublisher(place.open(), SECOND)
    named = trainer.index.keys
    ours = {key.removeprefix("runs/a/") for key in place.objects() if "/weights/" in key}
    assert ours - {INDEX} == named, "what the killed one left is swept"
    publish(trainer, 3, 4, attempt=2)
    assert same(take(explorer), weights(4, attempt=2))
    trainer.close()


def test_a_deposed_trainer_cannot_publish_nor_take_over_again(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 2)
    second = AnchorPublisher(place.open(), SECOND)
    with pytest.raises(SupersededTrainerError, match="index is held by attempt 2 of run run-uid"):
        publish(trainer, 3, 3)
    for late in (FIRST, Owner("run-uid", 2, "cccc")):
        with pytest.raises(SupersededTrainerError, match="may not"):
            AnchorPublisher(place.open(), late)
    publish(second, 2, 2, attempt=2)
    assert same(take(explorer), weights(2, attempt=2))
    assert [row.weight_version for row in second.index.versions] == [1, 2]
    second.close()


def test_the_successor_of_a_restart_in_place_takes_over_and_goes_back_to_its_step(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 3)
    after = Owner("run-uid", 1, successor(FIRST.incarnation))
    restarted = AnchorPublisher(place.open(), after)
    with pytest.raises(SupersededTrainerError):
        publish(trainer, 4, 4)
    with pytest.raises(SupersededTrainerError, match="may not"):
        AnchorPublisher(place.open(), FIRST)
    publish(restarted, 2, 3, attempt=2)
    assert same(take(explorer), weights(3, attempt=2))
    restarted.close()


def test_one_that_is_deposed_between_object_and_index_publishes_nothing(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 2)
    taken_over: list[AnchorPublisher] = []

    def depose(point: str) -> None:
        if point == "object" and not taken_over:
            taken_over.append(AnchorPublisher(place.open(), SECOND))

    with enabled(PUBLISH, depose), pytest.raises(SupersededTrainerError):
        publish(trainer, 3, 3)
    newest = explorer.newest()
    assert newest is not None
    assert newest.weight_version == 2
    taken_over[0].close()


def test_versions_of_one_attempt_increase(trainer: AnchorPublisher) -> None:
    publish(trainer, 1, 2)
    with pytest.raises(StaleVersionError, match="version 2 is to be published, but version 2"):
        publish(trainer, 2, 2)
    publish(trainer, 3, 3)


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.DONE_BUT_500])
def test_an_index_that_was_put_and_whose_reply_is_lost_is_published_once(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader, fault: Fault
) -> None:
    publish(trainer, 1, 1)
    place.proxy.break_next(fault, "PUT", r"weights/INDEX\.json")
    publish(trainer, 2, 2)
    assert [row.weight_version for row in trainer.index.versions] == [1, 2]
    assert same(take(explorer), weights(2))


def test_after_a_version_that_the_store_refused_the_next_one_is_whole(
    place: Place, explorer: AnchorReader
) -> None:
    trainer = AnchorPublisher(place.open(limits=QUICK), FIRST)
    publish(trainer, 1, 1)
    place.proxy.break_next(Fault.REFUSED, "PUT", r"\.delta", left=20)
    with pytest.raises(StoreUnavailableError, match="SlowDown"):
        publish(trainer, 2, 2)
    place.proxy.rules.clear()
    publish(trainer, 3, 3)
    assert [row.weight_version for row in trainer.index.versions] == [1, 3]
    assert trainer.index.versions[-1].delta is None, "explorers do not have what it starts from"
    assert same(take(explorer), weights(3))
    trainer.close()


@pytest.mark.parametrize("which", [r"/2-[^/]*\.delta", r"weights/INDEX\.json"])
def test_a_version_that_is_late_goes_on_behind_and_the_next_one_follows_it(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader, which: str
) -> None:
    publish(trainer, 1, 1)
    take(explorer)
    place.proxy.break_next(Fault.DELAYED, "PUT", which, seconds=2.0)
    with pytest.raises(WeightsLateError, match="version 2 is still on its way into s3://"):
        trainer.publish(2, lambda: weights(2), 0.5)
    with pytest.raises(WeightsLateError, match="an earlier version is still on its way"):
        trainer.publish(3, lambda: weights(3), 0.1)
    publish(trainer, 4, 4)
    assert [row.weight_version for row in trainer.index.versions] == [1, 2, 4]
    assert list(take(explorer).taken) == [TransferKind.DELTA]
    assert same(take(explorer), weights(4))


def test_a_truncated_body_is_read_again(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 1)
    take(explorer)
    publish(trainer, 2, 3)
    for pattern in (r"INDEX\.json", r"2-[^/]*\.delta"):
        place.proxy.break_next(Fault.TRUNCATED, "GET", pattern)
    assert same(take(explorer), weights(3))


def test_around_a_damaged_delta_goes_an_anchor(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 1)
    take(explorer)
    publish(trainer, 2, 5)  # version 4 is an anchor, too
    place.proxy.break_next(Fault.CORRUPTED, "GET", r"/3-[^/]*\.delta", left=99)
    taken = take(explorer)
    assert same(taken, weights(5))
    assert taken.taken[TransferKind.WHOLE] > 0


def test_damage_on_every_way_is_refused_and_what_was_served_stays(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 1)
    take(explorer)
    publish(trainer, 2, 2)
    place.proxy.break_next(Fault.CORRUPTED, "GET", r"\.(delta|anchor)", left=99)
    with pytest.raises(DigestMismatchError, match="is damaged"):
        take(explorer)
    served = explorer.served
    assert served is not None
    assert all(torch.equal(served.tensors[name], tensor) for name, tensor in weights(1))
    place.proxy.rules.clear()
    assert same(take(explorer), weights(2))


def test_expired_credentials_are_named_and_what_was_served_stays(
    place: Place, trainer: AnchorPublisher
) -> None:
    explorer = AnchorReader(place.open(limits=QUICK))
    publish(trainer, 1, 1)
    row = take(explorer).version, row_of(place, 1).digest
    publish(trainer, 2, 2)
    place.proxy.break_next(
        Fault.REFUSED, "GET", r"\.delta", left=9, status=400, code="ExpiredToken"
    )
    with pytest.raises(WeightsUnavailableError, match="the credentials have expired"):
        take(explorer)
    served = explorer.served
    assert served is not None
    assert (served.version, served.digest) == row
    place.proxy.rules.clear()
    assert same(take(explorer), weights(2))
    explorer.close()


def test_versions_that_nothing_needs_go_after_their_grace_and_not_before(place: Place) -> None:
    now = [1000.0]
    rule = Retention(versions=2, seconds=0.0, grace_seconds=60.0)
    trainer = AnchorPublisher(
        place.open(),
        FIRST,
        retention=rule,
        anchor_every=2,
        clock=lambda: now[0],
    )
    publish(trainer, 1, 8)
    versions = [row.weight_version for row in trainer.index.versions]
    assert 4 not in versions
    before = {key for key in place.objects() if "/weights/" in key}
    assert any("/4-" in key for key in before), "an explorer may be reading it"
    now[0] += 61.0
    publish(trainer, 9, 9)
    trainer.close()
    after = {key.removeprefix("runs/a/") for key in place.objects() if "/weights/" in key}
    assert not any("/4-" in key for key in after)
    assert after - {INDEX} == trainer.index.keys
    reader = AnchorReader(place.open())
    assert same(take(reader), weights(9))
    reader.close()


def test_a_version_that_is_gone_is_said_to_be_gone(
    place: Place, trainer: AnchorPublisher, explorer: AnchorReader
) -> None:
    publish(trainer, 1, 1)
    row = row_of(place, 1)
    with pytest.raises(WeightsReplacedError, match="version 7 is not in s3://"):
        explorer.fetch(7, row.digest, 10.0)
    bucket: ObjectBucket = place.open()
    bucket.delete([one.key for one in row.objects])
    with pytest.raises(WeightsReplacedError, match="there is no such object"):
        take(explorer, row)


def test_weights_that_the_model_does_not_take_are_refused_before_they_are_read(
    place: Place, trainer: AnchorPublisher
) -> None:
    publish(trainer, 1, 1)
    reader = AnchorReader(place.open(), [TensorMeta("other", "float32", 4, (3,))])
    with pytest.raises(SchemaMismatchError, match="other is missing"):
        take(reader)
    assert reader.served is None
    reader.close()


def test_an_index_that_cannot_be_understood_is_refused_and_stays(
    place: Place, explorer: AnchorReader
) -> None:
    place.open().create(INDEX, b"{}")
    with pytest.raises(WeightsUnavailableError, match=r"INDEX\.json"):
        explorer.newest()
    with pytest.raises(Exception, match=r"INDEX\.json"):
        AnchorPublisher(place.open(), FIRST)
    assert place.open().get(INDEX).data == b"{}"
