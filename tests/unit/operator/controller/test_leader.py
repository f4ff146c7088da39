"""Leader election."""

import asyncio
import threading
import time as clock
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from trainsync.kube.lease import GIVE_UP_SECONDS, LEASE_SECONDS
from trainsync_operator.controller import leader
from trainsync_operator.controller.leader import Elector, Leadership, LeadershipLostError
from trainsync_operator.kube.client import ApiError
from trainsync_operator.kube.kinds import LEASE, Kind

from tests.unit.operator.fake_api import FakeApi


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def api() -> FakeApi:
    return FakeApi(lambda: datetime(2026, 1, 1, tzinfo=UTC))


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leader, "RENEW_SECONDS", 0.001)
    monkeypatch.setattr(leader, "LOOK_SECONDS", 0.001)
    yield


def elector(api: FakeApi, time: Time, identity: str) -> Elector:
    return Elector(api, "team", "operator", identity, time)


async def test_one_leads_and_the_other_waits(api: FakeApi, time: Time) -> None:
    first, second = elector(api, time, "a"), elector(api, time, "b")
    assert await first.try_once()
    assert not await second.try_once()
    assert await first.try_once(), "it renews"


async def test_a_lease_that_is_not_renewed_is_taken_over_after_its_duration(
    api: FakeApi, time: Time
) -> None:
    first, second = elector(api, time, "a"), elector(api, time, "b")
    await first.try_once()
    assert not await second.try_once()
    time.now += LEASE_SECONDS
    assert not await second.try_once()
    time.now += 0.1
    assert await second.try_once()
    assert not await first.try_once()
    assert api.all(LEASE)[0]["spec"]["leaseTransitions"] == 1


async def test_a_lease_that_is_renewed_is_never_taken_however_wrong_its_clock(
    api: FakeApi, time: Time
) -> None:
    first, second = elector(api, time, "a"), elector(api, time, "b")
    await first.try_once()
    for turn in range(5):
        api.all(LEASE)[0]["spec"]["renewTime"] = f"1970-01-01T00:00:0{turn}.000000Z"
        assert not await second.try_once()
        time.now += LEASE_SECONDS - 1


async def test_of_two_that_take_a_free_lease_at_once_one_wins(api: FakeApi, time: Time) -> None:
    await elector(api, time, "gone").try_once()
    await elector(api, time, "gone").release()
    results = await asyncio.gather(
        elector(api, time, "a").try_once(), elector(api, time, "b").try_once()
    )
    assert sorted(results) == [False, True]


async def test_a_released_lease_is_free_at_once(api: FakeApi, time: Time) -> None:
    first = elector(api, time, "a")
    await first.try_once()
    await first.release()
    assert await elector(api, time, "b").try_once()


async def test_a_leader_that_cannot_renew_stops_before_another_may_start(
    api: FakeApi, time: Time
) -> None:
    first = elector(api, time, "a")
    await first.try_once()

    def unreachable(verb: str, kind: Kind, name: str) -> None:
        time.now += 1
        raise ApiError("not reached")

    api.before_write = unreachable
    began = time.now
    with pytest.raises(LeadershipLostError, match="not renewed in time"):
        await first.keep()
    assert time.now - began <= GIVE_UP_SECONDS + 1 < LEASE_SECONDS


async def test_a_leader_whose_lease_was_taken_stops(api: FakeApi, time: Time) -> None:
    first = elector(api, time, "a")
    await first.try_once()
    api.all(LEASE)[0]["spec"]["holderIdentity"] = "b"
    with pytest.raises(LeadershipLostError, match="taken by another"):
        await first.keep()


async def test_the_time_of_a_lease_counts_from_the_request_not_from_its_answer(
    api: FakeApi, time: Time
) -> None:
    first = elector(api, time, "a")

    def slow(verb: str, kind: Kind, name: str) -> None:
        time.now += GIVE_UP_SECONDS - 1

    api.before_write = slow
    assert await first.try_once()
    time.now += 1
    with pytest.raises(LeadershipLostError, match="not renewed in time"):
        await asyncio.wait_for(first.keep(), 5)


def leadership(api: FakeApi, died: threading.Event | None = None) -> Leadership:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Elector]:
        yield Elector(api, "team", "operator", "a", clock.monotonic)

    return Leadership(opened, (died or threading.Event()).set)


async def test_a_busy_operator_renews_in_time(api: FakeApi) -> None:
    leading = leadership(api)
    await leading.acquire()
    before = len(api.writes)
    clock.sleep(0.2)  # noqa: ASYNC251 -- this is the point: nothing else of the loop gets on
    assert len(api.writes) - before > 5
    await leading.release()
    assert api.all(LEASE)[0]["spec"]["holderIdentity"] == ""


async def test_a_lost_lease_is_told_and_the_process_that_stops_is_left_alone(api: FakeApi) -> None:
    died = threading.Event()
    leading = leadership(api, died)
    await leading.acquire()
    api.all(LEASE)[0]["spec"]["holderIdentity"] = "b"
    with pytest.raises(LeadershipLostError, match="taken by another"):
        await asyncio.wait_for(leading.lost(), 30)
    await leading.release()
    assert not died.is_set()
    assert api.all(LEASE)[0]["spec"]["holderIdentity"] == "b"


async def test_a_process_that_does_not_stop_before_a_successor_may_start_is_ended(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "LEASE_SECONDS", GIVE_UP_SECONDS + 0.05)
    died = threading.Event()
    leading = leadership(api, died)
    await leading.acquire()
    api.all(LEASE)[0]["spec"]["holderIdentity"] = "b"
    assert died.wait(30)  # the operator's loop is blocked meanwhile
    with pytest.raises(LeadershipLostError, match="taken by another"):
        await asyncio.wait_for(leading.lost(), 30)


async def test_a_follower_that_is_stopped_leaves_the_lease_alone(api: FakeApi) -> None:
    await Elector(api, "team", "operator", "b", clock.monotonic).try_once()
    leading = leadership(api)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(leading.acquire(), 0.05)
    await leading.release()
    assert api.all(LEASE)[0]["spec"]["holderIdentity"] == "b"
