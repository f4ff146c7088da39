"""`CatchUps`: explorers without the weights are sent them again, once for each connection."""

import pytest
from trainsync.weights.pacing.catch_up import CatchUps
from trainsync.weights.synchronizer.roster import LOST, REQUIRE_SYNC, RUNNING, Serving
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import Announcement, Published, VersionMeta


@pytest.fixture
def state() -> WeightsState:
    state = WeightsState()
    state.set_group(TrainerEndpoint("h", 1, 0, "t"))
    return state


def waits(state: WeightsState, name: str, session: str = "s") -> None:
    state.register(name, session, 0.0)
    state.renew(name, session, 0.0, ready=True)
    state.set_explorer_status(name, session, REQUIRE_SYNC, 0.0)


def broadcast(state: WeightsState, version: int, *served: str, **lost: str) -> None:
    """Announced as one that reached these; the same version again is a catch-up."""
    published = Published(VersionMeta(version, "d", (), "nccl", 10))
    state.announce(Announcement(published, lost=lost, served=served, again=True), 0.0)


def comes_back(state: WeightsState, name: str, serving: int) -> None:
    """The same process connects again after the notice of its loss."""
    state.rejoin(name, "s", Serving(serving, "d"), 0.0)
    state.renew(name, "s", 0.0, ready=True)
    state.set_explorer_status(name, "s", REQUIRE_SYNC, 0.0)


def test_an_explorer_that_joins_after_the_broadcast_gets_the_version_once(
    state: WeightsState,
) -> None:
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


def test_an_explorer_with_the_version_is_loading_also_while_others_are_sent_it_again(
    state: WeightsState,
) -> None:
    waits(state, "loads")
    broadcast(state, 4, "loads")
    assert not CatchUps().due(state, 4, 4)
    waits(state, "late")
    broadcast(state, 4, "late")
    assert state.roster.behind(4) == ["loads"], "it is waited for"
    assert not CatchUps().due(state, 4, 4)


def test_a_connected_explorer_that_missed_the_broadcast_is_sent_the_version_and_not_awaited(
    state: WeightsState,
) -> None:
    catch_ups = CatchUps()
    waits(state, "served")
    waits(state, "missed")
    broadcast(state, 4, "served")
    assert state.roster.behind(4) == ["served"]
    assert catch_ups.due(state, 4, 4)
    broadcast(state, 4, "missed")
    assert not catch_ups.due(state, 4, 4)
    for name in ("served", "missed"):
        state.acknowledge(name, "s", 4, "d", 0.0)
    assert state.roster.behind(5) == ["served", "missed"]


def test_an_explorer_with_a_broken_link_during_the_broadcast_is_sent_the_version_on_return(
    state: WeightsState,
) -> None:
    catch_ups = CatchUps()
    waits(state, "e")
    state.renew("e", "s", 0.0, ready=False)
    broadcast(state, 4)
    assert not catch_ups.due(state, 4, 4), "nobody is there"
    state.renew("e", "s", 0.0, ready=True)
    assert catch_ups.due(state, 4, 4)


def test_a_version_lost_by_all_is_sent_again_although_an_older_one_is_published(
    state: WeightsState,
) -> None:
    catch_ups = CatchUps()
    waits(state, "e")
    broadcast(state, 3, "e")
    state.acknowledge("e", "s", 3, "d", 0.0)
    state.give_up("e", "its connection ended", 0.0)  # 4 reached no explorer, and is not announced
    assert not catch_ups.due(state, 4, 4)
    comes_back(state, "e", 3)
    assert not state.explorers["e"].returning, "it serves what is published"
    assert catch_ups.due(state, 4, 4)
    broadcast(state, 4, "e")
    assert not catch_ups.due(state, 4, 4)


def test_training_without_a_version_that_no_explorer_got_sends_the_next_when_all_wait(
    state: WeightsState,
) -> None:
    for name in ("a", "b"):
        waits(state, name)
        broadcast(state, 3, name)
        state.acknowledge(name, "s", 3, "d", 0.0)
    state.set_explorer_status("a", "s", REQUIRE_SYNC, 0.0)
    assert state.explorers["b"].status == RUNNING
    assert not CatchUps().due(state, 5, 4), "b may bring the next in its time"
    state.set_explorer_status("b", "s", REQUIRE_SYNC, 0.0)
    assert not CatchUps().due(state, 5, 3), "nothing was missed"
    assert CatchUps().due(state, 5, 4)


def test_it_is_sent_again_after_each_loss_but_not_for_ever(state: WeightsState) -> None:
    catch_ups = CatchUps()
    waits(state, "e")
    broadcast(state, 4, e="its connection ended")
    resends = 0
    for _ in range(9):
        assert state.explorers["e"].status == LOST
        assert not catch_ups.due(state, 4, 4), "it is not there"
        comes_back(state, "e", 3)
        resends += catch_ups.due(state, 4, 4)
        assert not catch_ups.due(state, 4, 4), "what became of it shows by the next connection"
        broadcast(state, 4, e="its connection ended")
    assert resends == 3
    comes_back(state, "e", 3)
    assert catch_ups.due(state, 5, 5), "another step counts anew"


def test_an_explorer_given_up_during_a_load_is_sent_the_version_again(state: WeightsState) -> None:
    waits(state, "e")
    broadcast(state, 4, "e")
    state.give_up("e", "the trainer waited for it", 0.0)
    comes_back(state, "e", 3)
    assert CatchUps().due(state, 4, 4)


def test_an_explorer_that_joins_after_the_first_weights_reached_no_explorer_gets_them(
    state: WeightsState,
) -> None:
    waits(state, "e")
    assert state.versions.published is None
    assert CatchUps().due(state, 0, 0)


def test_an_unconnected_or_busy_explorer_delays_no_version(state: WeightsState) -> None:
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


def test_a_version_is_sent_early_only_if_no_explorer_has_it(
    state: WeightsState,
) -> None:
    state.register("works", "s", 0.0)
    broadcast(state, 4, "works")
    waits(state, "late")
    assert not CatchUps().due(state, 5, 4)
    state.give_up("works", "it died", 0.0)
    assert CatchUps().due(state, 5, 4)
