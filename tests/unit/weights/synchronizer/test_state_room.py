"""The published version makes room for the next one when no explorer needs its bytes."""

import pytest
from trainsync.weights.synchronizer.failover_state import FailoverState, StateChanges, rebuild
from trainsync.weights.synchronizer.roster import STOPPED
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import HeldPart, PartMeta

PART = PartMeta(0, 1, 10, "d", b"[]")


def published(version: int, *explorers: str) -> WeightsState:
    state = WeightsState()
    for explorer in explorers:
        state.register(explorer, "s", 0.0)
    state.upload(version, PART, f"ref{version}", 0.0)
    return state


def acknowledge(state: WeightsState, explorer: str) -> None:
    assert state.versions.published is not None
    meta = state.versions.published.meta
    state.acknowledge(explorer, "s", meta.version, meta.digest, 0.0)


def test_bytes_are_freed_when_all_explorers_have_acknowledged_and_the_version_stays() -> None:
    state = published(3, "a", "b")
    acknowledge(state, "a")
    assert not state.make_room(4)
    assert not state.versions.withdrawn
    acknowledge(state, "b")
    assert state.make_room(4)
    assert state.versions.withdrawn
    assert state.version == 3
    assert state.versions.published is not None
    assert state.versions.published.payloads == (None,)
    assert state.make_room(4), "every rank asks"
    state.upload(4, PART, "ref4", 0.0)
    assert not state.versions.withdrawn


@pytest.mark.parametrize("version", [2, 3])
def test_nothing_goes_for_a_version_that_is_no_newer(version: int) -> None:
    state = published(3)
    assert not state.make_room(version)
    assert not state.versions.withdrawn


def test_lost_and_stopped_explorers_are_not_awaited() -> None:
    state = published(3, "lost", "stopped")
    state.give_up("lost", "silent", 0.0)
    assert not state.make_room(4)
    state.set_explorer_status("stopped", "s", STOPPED, 0.0)
    assert state.make_room(4)


def test_one_that_came_back_and_still_fetches_keeps_the_bytes() -> None:
    state = published(3, "e")
    state.give_up("e", "silent", 0.0)
    state.rejoin("e", "s", None, 1.0)
    assert not state.roster.behind(3), "nobody waits for it"
    assert not state.make_room(4)


def test_an_acknowledgement_counts_although_the_bytes_are_gone() -> None:
    state = published(3, "e")
    state.give_up("e", "silent", 0.0)
    assert state.make_room(4)
    state.rejoin("e", "s", None, 1.0)
    acknowledge(state, "e")
    assert state.explorers["e"].version == 3


def test_room_is_made_before_the_first_version_too() -> None:
    assert WeightsState().make_room(0)
    assert not WeightsState().versions.withdrawn


def test_a_state_that_is_built_again_knows_that_the_bytes_are_gone() -> None:
    state = published(3)
    failover = FailoverState(-1)
    failover.apply(StateChanges(1, (HeldPart(3, PART, "ref3"),), {}, state.trainer_status))
    assert failover.remembered().parts[0].payload == "ref3"
    state.make_room(4)
    failover.apply(StateChanges(2, (), {}, state.trainer_status, withdrawn=3))
    remembered = failover.remembered()
    assert [held.payload for held in remembered.parts] == [None]
    again = rebuild(remembered, 10.0, now=5.0)
    assert again.versions.withdrawn
    assert again.version == 3
    assert again.upload(4, PART, "ref4", 6.0)
    assert not again.versions.withdrawn
