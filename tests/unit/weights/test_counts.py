"""How many bytes explorers took: each counts once, also when the Synchronizer is built again."""

import pytest
from trainsync.weights.counts import BroadcastTraffic, Traffic, TransferKind
from trainsync.weights.errors import DigestMismatchError
from trainsync.weights.synchronizer.failover_state import FailoverState, StateChanges, rebuild
from trainsync.weights.synchronizer.report import weights_report
from trainsync.weights.synchronizer.roster import Serving
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import Announcement, Published, VersionMeta


def published(version: int) -> Published:
    return Published(VersionMeta(version, f"d{version}", (), "nccl", 100))


def rebuilt(state: WeightsState) -> WeightsState:
    failover = FailoverState(-1)
    changes = StateChanges(
        1, (), dict(state.explorers), "running", state.versions.announced, traffic=state.traffic
    )
    failover.apply(changes)
    return rebuild(failover.remembered(), 10.0, 0.0)


def test_what_an_explorer_took_counts_once_however_often_it_says_so() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    state.announce(Announcement(published(1)), 0.0)
    for _ in range(2):
        state.acknowledge("e", "s", 1, "d1", 0.0, {TransferKind.WHOLE: 100})
    state.renew("e", "s", 0.0, Serving(1, "d1", {TransferKind.WHOLE: 100}))
    state.rejoin("e", "s", Serving(1, "d1", {TransferKind.WHOLE: 100}), 0.0)
    state.acknowledge("e", "s", 1, "d1", 0.0, {TransferKind.WHOLE: 100})
    assert state.traffic.taken == {TransferKind.WHOLE: 100}
    state.announce(Announcement(published(2)), 0.0)
    state.acknowledge("e", "s", 2, "d2", 0.0, {TransferKind.DELTA: 3, TransferKind.WHOLE: 7})
    assert state.traffic.taken == {TransferKind.WHOLE: 107, TransferKind.DELTA: 3}


def test_a_new_process_takes_a_version_once_more() -> None:
    state = WeightsState()
    state.announce(Announcement(published(1)), 0.0)
    for session in ("first", "second"):
        state.register("e", session, 0.0)
        state.acknowledge("e", session, 1, "d1", 0.0, {TransferKind.VOLUME: 100})
    assert state.traffic.taken == {TransferKind.VOLUME: 200}


def test_bytes_of_a_version_that_is_not_served_do_not_count() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    state.announce(Announcement(published(1)), 0.0)
    with pytest.raises(DigestMismatchError):
        state.acknowledge("e", "s", 1, "other", 0.0, {TransferKind.WHOLE: 100})
    assert state.traffic == Traffic()


def test_a_state_that_is_built_again_goes_on_counting_and_counts_nothing_twice() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    sent = BroadcastTraffic("first", {TransferKind.SHARED_MEMORY: 100}, 1)
    state.announce(Announcement(published(1), sent=sent), 0.0)
    state.acknowledge("e", "s", 1, "d1", 0.0)
    again = rebuilt(state)
    again.announce(Announcement(published(1), sent=sent, again=True), 0.0)
    again.acknowledge("e", "s", 1, "d1", 0.0, {TransferKind.WHOLE: 5})
    assert again.traffic == state.traffic == Traffic({TransferKind.SHARED_MEMORY: 100}, 1, "first")
    again.announce(
        Announcement(
            published(1), sent=BroadcastTraffic("caught up", {TransferKind.WHOLE: 10}), again=True
        ),
        0.0,
    )
    told = weights_report(again)
    assert (told.taken["shared_memory"], told.taken["whole"], told.resends) == (100, 10, 1)


def test_an_acknowledgement_that_died_with_the_state_before_is_made_good_with_its_bytes() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    state.announce(Announcement(published(1)), 0.0)
    again = rebuilt(state)
    for _ in range(2):
        again.renew("e", "s", 0.0, Serving(1, "d1", {TransferKind.WHOLE: 100}))
    assert again.traffic.taken == {TransferKind.WHOLE: 100}
