"""A state that is built again: nothing that was answered for is lost, or goes back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.errors import InconsistentUploadError, StaleVersionError
from trainsync.weights.synchronizer.failover_state import (
    FailoverState,
    PartJournal,
    StateChanges,
    rebuild,
)
from trainsync.weights.synchronizer.roster import REQUIRE_SYNC, RUNNING, STOPPED, Serving
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import HeldPart, PartMeta, version_digest


def part(rank: int, version: int, world_size: int = 2) -> PartMeta:
    return PartMeta(rank, world_size, 10, f"{version}.{rank}", b"[]")


def digest(version: int) -> str:
    return version_digest(version, (part(0, version), part(1, version)))


def held(version: int, rank: int) -> HeldPart:
    return HeldPart(version, part(rank, version), f"ref{version}.{rank}")


def failover_of(state: WeightsState, *parts: HeldPart, floor: int = -1) -> FailoverState:
    failover = FailoverState(floor)
    failover.apply(StateChanges(9, parts, dict(state.explorers), state.trainer_status))
    return failover


def test_a_rebuilt_state_publishes_the_same_and_knows_the_same_explorers() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    for rank in (0, 1):
        state.upload(3, part(rank, 3), f"ref3.{rank}", 0.0)
    state.acknowledge("e", "s", 3, digest(3), 0.0)
    state.set_trainer_status(STOPPED)
    failover = failover_of(state, held(3, 0), held(3, 1), held(4, 1))
    again = rebuild(failover.remembered(), 10.0, now=100.0)
    assert again.versions.published is not None and state.versions.published is not None
    assert again.versions.published == state.versions.published
    assert again.trainer_status == STOPPED
    assert (again.explorers["e"].version, again.explorers["e"].expires) == (3, 110.0)
    assert again.upload(4, part(0, 4), "ref4.0", 101.0), "the other rank's part was remembered"


def test_a_part_whose_answer_was_lost_may_come_again() -> None:
    state = WeightsState()
    assert not state.upload(1, part(0, 1), "a", 0.0)
    assert not state.upload(1, part(0, 1), "a", 0.0, again=True)
    with pytest.raises(InconsistentUploadError, match="rank 0 uploaded it already"):
        state.upload(1, PartMeta(0, 2, 10, "other", b"[]"), "a", 0.0, again=True)
    assert state.upload(1, part(1, 1), "b", 0.0)
    assert state.upload(1, part(1, 1), "b", 0.0, again=True)
    with pytest.raises(StaleVersionError):
        state.upload(1, PartMeta(1, 2, 10, "other", b"[]"), "b", 0.0, again=True)


def test_what_an_explorer_serves_is_never_gone_back_on() -> None:
    state = WeightsState(rebuilt=True)
    state.rejoin("e", "s", Serving(5, digest(5)), 0.0)
    with pytest.raises(StaleVersionError):
        state.upload(4, part(0, 4), "x", 0.0)
    state.upload(5, part(0, 5), "x", 0.0)
    assert state.upload(5, part(1, 5), "y", 0.0), "the same version may be uploaded once more"
    assert state.roster.behind(5) == []


def test_an_acknowledgement_of_a_version_that_was_not_remembered_is_believed() -> None:
    state = WeightsState(rebuilt=True)
    state.rejoin("e", "s", None, 0.0)
    state.acknowledge("e", "s", 5, digest(5), 0.0)
    assert state.explorers["e"].version == 5
    with pytest.raises(StaleVersionError):
        state.upload(4, part(0, 4), "x", 0.0)


def test_a_sign_of_life_tells_of_an_acknowledgement_that_was_not_remembered() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    parts = held(5, 0), held(5, 1)
    again = rebuild(failover_of(state, *parts).remembered(), 10.0, 0.0)
    assert again.roster.behind(5) == ["e"]
    assert again.renew("e", "s", 1.0, Serving(5, digest(5)))
    assert again.roster.behind(5) == []
    assert not again.renew("e", "s", 2.0, Serving(5, digest(5)))


def test_other_bytes_under_a_version_that_is_served_are_refused() -> None:
    state = WeightsState(rebuilt=True)
    state.rejoin("e", "s", Serving(5, "other"), 0.0)
    state.upload(5, part(0, 5), "x", 0.0)
    with pytest.raises(InconsistentUploadError, match="explorer e already serves a version 5"):
        state.upload(5, part(1, 5), "y", 0.0)
    state.upload(6, part(0, 6), "x", 0.0)
    assert state.upload(6, part(1, 6), "y", 0.0)


def test_a_waiting_explorer_still_waits_after_a_rebuild() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    state.set_explorer_status("e", "s", REQUIRE_SYNC, 0.0)
    again = rebuild(failover_of(state).remembered(), 10.0, 0.0)
    again.renew("e", "s", 1.0)
    assert again.explorers["e"].status == REQUIRE_SYNC
    assert again.trainer_status == RUNNING


def test_the_journal_holds_what_the_follower_lacks_and_what_still_counts() -> None:
    journal = PartJournal()
    journal.add(1, held(1, 0), published=-1)
    journal.add(2, held(1, 1), published=1)
    journal.taken(1)
    assert journal.parts() == (held(1, 1),)
    journal.add(3, held(2, 0), published=2)
    assert journal.parts() == (held(2, 0),)
    assert journal.followed == 1


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=40),
    st.sets(st.integers(0, 39)),
    st.sets(st.integers(0, 39)),
)
def test_wherever_it_dies_what_was_answered_for_is_there_again(
    uploads: list[tuple[int, int]], polls: set[int], deaths: set[int]
) -> None:
    """Like the actor: a part counts as accepted when the follower has it."""
    failover, state, journal, revision = FailoverState(-1), WeightsState(), PartJournal(), 0
    answered = WeightsState()
    newest = -1
    for index, (version, rank) in enumerate(uploads):
        with contextlib.suppress(StaleVersionError, InconsistentUploadError):
            state.upload(version, part(rank, version), (version, rank), 0.0, again=True)
            revision += 1
            journal.add(revision, HeldPart(version, part(rank, version), (version, rank)), newest)
        if index in polls:
            failover.apply(StateChanges(revision, journal.parts(), {}, RUNNING))
            journal.taken(revision)
            answered = rebuild(failover.remembered(), 10.0, 0.0)
            assert answered.version == state.version
            assert answered.versions.held() == state.versions.held()
        if index in deaths:
            state = rebuild(failover.remembered(), 10.0, 0.0)
            journal, revision = PartJournal(), 0
            assert state.version == answered.version >= newest
        newest = answered.version
