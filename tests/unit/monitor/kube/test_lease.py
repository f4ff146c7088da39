import pytest
from trainsync.kube.client import KubeError
from trainsync.kube.lease import GIVE_UP_SECONDS, LEASE_SECONDS
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.kube.lease import Lease

from tests.unit.monitor.fakes import FakeApi


class Seconds:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lease_of(api: FakeApi, identity: str, clock: Seconds) -> Lease:
    owner = {"apiVersion": "v1", "kind": "TrainingRun", "name": "run", "uid": "u"}
    return Lease(
        api, name="run-monitor", namespace="ns", identity=identity, owner=owner, clock=clock
    )


async def test_it_is_held_from_the_first_success_until_it_is_not_renewed(api: FakeApi) -> None:
    clock = Seconds()
    lease = lease_of(api, "a", clock)
    with pytest.raises(NotReadyError):
        lease.gate()
    assert await lease.try_once()
    lease.gate()
    clock.now = GIVE_UP_SECONDS - 0.1
    lease.gate()
    clock.now = GIVE_UP_SECONDS
    with pytest.raises(NotReadyError):
        lease.gate()


async def test_a_slow_answer_counts_from_when_it_was_asked(api: FakeApi) -> None:
    clock = Seconds()
    lease = lease_of(api, "a", clock)
    get_lease = api.get_lease

    async def slow() -> object:
        clock.now += GIVE_UP_SECONDS - 1
        return await get_lease()

    api.get_lease = slow  # type: ignore[method-assign,assignment]
    assert await lease.try_once()
    clock.now += 2.1
    assert not lease.held


async def test_a_lapse_while_the_answer_is_awaited_is_a_new_term(api: FakeApi) -> None:
    clock = Seconds()
    lease = lease_of(api, "a", clock)
    assert await lease.try_once()
    get_lease = api.get_lease

    async def slow() -> object:
        clock.now += GIVE_UP_SECONDS - 1
        return await get_lease()

    api.get_lease = slow  # type: ignore[method-assign,assignment]
    clock.now = GIVE_UP_SECONDS - 1
    assert await lease.try_once()
    assert lease.held
    assert lease.term() == 2  # another one may have had it: the ledger is read again


async def test_the_holder_stops_before_a_successor_may_start(api: FakeApi) -> None:
    clock = Seconds()
    first, second = lease_of(api, "a", clock), lease_of(api, "b", clock)
    assert await first.try_once()
    held_by_both = False
    taken_at = None
    for _ in range(40):
        clock.now += 1
        if await second.try_once():
            taken_at = clock.now
            break
        held_by_both |= first.held and second.held
    assert taken_at is not None
    assert taken_at > LEASE_SECONDS
    assert not held_by_both
    assert not first.held
    assert not await first.try_once()


async def test_a_renewed_lease_stays_with_its_holder(api: FakeApi) -> None:
    clock = Seconds()
    first, second = lease_of(api, "a", clock), lease_of(api, "b", clock)
    for _ in range(30):
        clock.now += 3
        assert await first.try_once()
        assert not await second.try_once()
    assert first.term() == 1


async def test_a_container_that_restarts_in_its_pod_need_not_wait(api: FakeApi) -> None:
    clock = Seconds()
    assert await lease_of(api, "pod-1", clock).try_once()
    assert await lease_of(api, "pod-1", clock).try_once()


async def test_a_released_lease_is_free_at_once(api: FakeApi) -> None:
    clock = Seconds()
    first, second = lease_of(api, "a", clock), lease_of(api, "b", clock)
    await first.try_once()
    await first.release()
    assert not first.held
    assert await second.try_once()
    await first.release()
    assert second.held
    assert api.lease is not None
    assert api.lease["spec"]["holderIdentity"] == "b"
    assert api.lease["spec"]["leaseTransitions"] == 1


async def test_winning_it_again_is_a_new_term(api: FakeApi) -> None:
    clock = Seconds()
    lease = lease_of(api, "a", clock)
    await lease.try_once()
    clock.now += GIVE_UP_SECONDS + 1
    assert not lease.held
    await lease.try_once()
    assert lease.term() == 2


async def test_an_api_server_that_is_away_costs_the_lease_only_after_a_while(api: FakeApi) -> None:
    clock = Seconds()
    lease = lease_of(api, "a", clock)
    await lease.try_once()
    api.fail = KubeError(None, "refused")
    clock.now += 3
    assert await lease.try_once()
    clock.now += GIVE_UP_SECONDS
    assert not await lease.try_once()


async def test_of_two_at_the_same_moment_one_gets_it(api: FakeApi) -> None:
    clock = Seconds()
    first, second = lease_of(api, "a", clock), lease_of(api, "b", clock)
    await first.try_once()
    await first.release()
    replace = api.replace_lease

    async def slower(lease: dict[str, object]) -> dict[str, object]:
        api.replace_lease = replace  # type: ignore[method-assign]
        assert await second.try_once()
        return await replace(lease)

    api.replace_lease = slower  # type: ignore[method-assign,assignment]
    assert not await first.try_once()
    assert second.held
