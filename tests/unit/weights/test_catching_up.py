"""`CatchUps`: weights are sent again to whoever came too late for them, once."""

import pytest
from trainsync.weights.catching_up import CatchUps
from trainsync.weights.link import Endpoint
from trainsync.weights.liveness import REQUIRE_SYNC
from trainsync.weights.state import WeightsState
from trainsync.weights.versions import Published, VersionMeta


@pytest.fixture
def state() -> WeightsState:
    state = WeightsState()
    state.set_group(Endpoint("h", 1, 0, "t"))
    return state


def waits(state: WeightsState, name: str, session: str = "s") -> None:
    state.register(name, session, 0.0)
    state.renew(name, session, 0.0, ready=True)
    state.set_explorer_status(name, session, REQUIRE_SYNC, 0.0)


def broadcast(state: WeightsState, version: int) -> None:
    state.announce(Published(VersionMeta(version, "d", (), "nccl", 10)), 0.0, 0.0)


def test_who_joins_after_the_broadcast_gets_it_once(state: WeightsState) -> None:
    catch_ups = CatchUps()
    broadcast(state, 4)
    assert not catch_ups.due(state, 4, 4)
    waits(state, "late")
    assert catch_ups.due(state, 4, 4)
    assert not catch_ups.due(state, 4, 4), "whatever became of it"
    waits(state, "later")
    assert catch_ups.due(state, 4, 4)
    assert catch_ups.due(state, 5, 5), "the weights are others"


def test_a_process_that_replaces_another_counts_anew(state: WeightsState) -> None:
    catch_ups = CatchUps()
    broadcast(state, 4)
    waits(state, "e", "first")
    assert catch_ups.due(state, 4, 4)
    waits(state, "e", "second")
    assert catch_ups.due(state, 4, 4)


def test_who_was_there_when_it_was_sent_is_only_loading_it(state: WeightsState) -> None:
    waits(state, "e")
    broadcast(state, 4)
    assert not CatchUps().due(state, 4, 4)


def test_who_came_when_the_first_weights_had_gone_to_nobody_gets_them(state: WeightsState) -> None:
    waits(state, "e")
    assert state.published is None
    assert CatchUps().due(state, 0, 0)


def test_who_is_not_connected_or_does_not_wait_holds_nothing_up(state: WeightsState) -> None:
    broadcast(state, 4)
    state.register("busy", "s", 0.0)
    state.renew("busy", "s", 0.0, ready=True)
    state.register("mute", "s", 0.0)
    state.set_explorer_status("mute", "s", REQUIRE_SYNC, 0.0)
    assert not CatchUps().due(state, 4, 4)


def test_what_is_not_broadcast_is_never_sent_again() -> None:
    state = WeightsState()
    waits(state, "e")
    assert not CatchUps().due(state, 4, 4)


def test_a_version_is_sent_before_its_time_only_if_nobody_is_left_to_bring_it(
    state: WeightsState,
) -> None:
    state.register("works", "s", 0.0)
    broadcast(state, 4)
    waits(state, "late")
    assert not CatchUps().due(state, 5, 4)
    state.give_up("works", "it died", 0.0)
    assert CatchUps().due(state, 5, 4)
