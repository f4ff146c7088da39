"""A process that has nothing of a run but the store of its weights, on a real S3 server."""

import time
from collections.abc import Iterator

import pytest
import torch
from trainsync import StoreFollower
from trainsync.api import env
from trainsync.runtime.errors import SettingsError
from trainsync.weights.errors import SchemaMismatchError, WeightsError, WeightsUnavailableError
from trainsync.weights.transports.anchors.index import Owner
from trainsync.weights.transports.anchors.publisher import AnchorPublisher

from tests.store.conftest import Place
from tests.store.processes.publishing import weights
from tests.store.servers.fault_proxy import Fault
from tests.store.weights.test_anchors import publish, row_of, same

SECONDS = 60.0


@pytest.fixture
def trainer(place: Place) -> Iterator[AnchorPublisher]:
    made = AnchorPublisher(place.open(), Owner("run", 1, "aaaa"))
    yield made
    made.close()


@pytest.fixture
def follower(place: Place) -> Iterator[StoreFollower]:
    with StoreFollower(place.url(), timeout=SECONDS) as made:
        yield made


def test_a_follower_gets_each_newest_version_once_by_deltas(
    trainer: AnchorPublisher, follower: StoreFollower
) -> None:
    assert follower.next(0.0) is None
    publish(trainer, 1, 2)
    first = follower.next(SECONDS)
    assert first is not None
    assert first.version == 2
    assert same(first, weights(2))
    assert follower.next(0.0) is None
    publish(trainer, 3, 5)
    second = follower.next(SECONDS)
    assert second is not None
    assert same(second, weights(5))
    assert list(second.taken) == ["delta"]


def test_a_new_attempt_s_version_is_taken_also_of_an_earlier_step(
    place: Place, trainer: AnchorPublisher, follower: StoreFollower
) -> None:
    publish(trainer, 1, 4)
    assert follower.next(SECONDS) is not None
    successor = AnchorPublisher(place.open(), Owner("run", 2, "bbbb"))
    publish(successor, 2, 2)
    successor.close()
    taken = follower.next(SECONDS)
    assert taken is not None
    assert taken.version == 2
    assert same(taken, weights(2))


def test_a_store_that_is_away_for_a_moment_is_waited_for_and_else_named(
    place: Place, trainer: AnchorPublisher, follower: StoreFollower
) -> None:
    publish(trainer, 1, 1)
    away = place.proxy.break_next(Fault.REFUSED, "GET", left=10_000)
    with pytest.raises(WeightsUnavailableError, match="s3://"):
        StoreFollower(place.url(), timeout=2.0).next(0.0)
    away.left = 3
    taken = follower.next(SECONDS)
    assert taken is not None
    assert same(taken, weights(1))


def test_an_object_that_is_gone_is_told_of_in_time_and_the_next_anchor_mends_it(
    place: Place, trainer: AnchorPublisher, follower: StoreFollower
) -> None:
    publish(trainer, 1, 1)
    place.open().delete([one.key for one in row_of(place, 1).objects])
    began = time.monotonic()
    with pytest.raises(WeightsError, match="no such object"):
        follower.next(2.0)
    assert time.monotonic() - began < SECONDS
    successor = AnchorPublisher(place.open(), Owner("run", 2, "bbbb"))
    publish(successor, 2, 2)
    successor.close()
    taken = follower.next(SECONDS)
    assert taken is not None
    assert same(taken, weights(2))


def test_weights_that_the_model_does_not_take_are_refused(
    place: Place, trainer: AnchorPublisher
) -> None:
    publish(trainer, 1, 1)
    expected = {"another": torch.empty(3)}
    with (
        StoreFollower(place.url(), expected=expected, timeout=SECONDS) as follower,
        pytest.raises(SchemaMismatchError),
    ):
        follower.next(SECONDS)


def test_a_store_that_is_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.SYNC_STORE_URL, raising=False)
    with pytest.raises(SettingsError, match=r"expected url, .* or TRAINSYNC_SYNC_STORE_URL"):
        StoreFollower()
    with pytest.raises(SettingsError, match="ftp"):
        StoreFollower("ftp://bucket/a")
