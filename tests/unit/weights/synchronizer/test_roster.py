"""Leases of explorers: a silent explorer is lost, is not awaited, and may return."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.errors import (
    ExplorerLostError,
    ExplorerReplacedError,
    StaleVersionError,
    UnknownExplorerError,
)
from trainsync.weights.synchronizer.report import snapshot, weights_report
from trainsync.weights.synchronizer.roster import LOST, REQUIRE_SYNC, RUNNING, Serving
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import PartMeta, version_digest

LEASE = 10.0


def new_state() -> WeightsState:
    return WeightsState(lease_seconds=LEASE)


def publish(state: WeightsState, version: int, now: float = 0.0) -> str:
    part = PartMeta(0, 1, 10, f"d{version}", b"[]")
    assert state.upload(version, part, f"ref{version}", now)
    return version_digest(version, (part,))


def test_an_explorer_silent_for_a_lease_is_lost_with_the_cause_and_not_awaited() -> None:
    state = new_state()
    state.register("dead", "s", 0.0)
    state.register("alive", "s", 0.0)
    digest = publish(state, 1, now=1.0)
    state.acknowledge("alive", "s", 1, digest, 9.0)
    assert state.roster.behind(1) == ["dead"]
    assert state.roster.next_expiry() == LEASE
    assert state.expire(9.99) == []
    assert state.expire(10.5) == ["dead"]
    assert state.roster.behind(1) == []
    assert state.clock.counts.last_duration == 9.5, "the synchronisation ends without the dead one"
    assert state.explorers["dead"].status == LOST
    assert snapshot(state).explorers["dead"].cause == "it was silent for 10.5 s"
    assert [e.state for e in weights_report(state).explorers] == [RUNNING, LOST]
    assert state.expire(18.0) == [], "nobody is lost twice, and the lease of the other was renewed"


@pytest.mark.parametrize("word", ["renew", "status", "acknowledge"])
def test_whatever_an_explorer_says_renews_its_lease(word: str) -> None:
    state = new_state()
    state.register("e", "s", 0.0)
    digest = publish(state, 1)
    if word == "renew":
        state.renew("e", "s", 8.0)
    elif word == "status":
        state.set_explorer_status("e", "s", REQUIRE_SYNC, 8.0)
    else:
        state.acknowledge("e", "s", 1, digest, 8.0)
    assert state.expire(17.9) == []
    assert state.expire(18.0) == ["e"]


def test_a_lost_explorer_is_told_so_and_comes_back_with_what_it_serves() -> None:
    state = new_state()
    state.register("e", "s", 0.0)
    old = publish(state, 1)
    state.acknowledge("e", "s", 1, old, 0.0)
    newest = publish(state, 2)
    state.expire(LEASE)
    with pytest.raises(ExplorerLostError, match=r"given up: it was silent for 10\.0 s"):
        state.renew("e", "s", 11.0)
    state.rejoin("e", "s", Serving(1, old), 11.0)
    back = state.explorers["e"]
    assert (back.version, back.status, back.cause) == (1, REQUIRE_SYNC, None)
    assert state.roster.behind(2) == [], "nobody waits for it before it has caught up"
    state.acknowledge("e", "s", 2, newest, 12.0)
    publish(state, 3)
    assert state.roster.behind(3) == ["e"], "from then on it is one like the others"


def test_one_that_comes_back_with_the_published_version_takes_part_at_once() -> None:
    state = new_state()
    state.register("e", "s", 0.0)
    digest = publish(state, 1)
    state.acknowledge("e", "s", 1, digest, 0.0)
    state.give_up("e", "it took too long", 1.0)
    assert state.explorers["e"].cause == "it took too long"
    state.rejoin("e", "s", Serving(1, digest), 2.0)
    assert state.explorers["e"].status == RUNNING
    publish(state, 2)
    assert state.roster.behind(2) == ["e"]


def test_one_that_comes_back_with_other_bytes_has_nothing() -> None:
    state = new_state()
    publish(state, 1)
    state.rejoin("e", "s", Serving(1, "other"), 0.0)
    assert (state.explorers["e"].version, state.explorers["e"].status) == (-1, REQUIRE_SYNC)


def test_one_that_claims_a_version_that_never_was_is_refused() -> None:
    state = new_state()
    publish(state, 1)
    with pytest.raises(StaleVersionError, match="newest is 1"):
        state.rejoin("e", "s", Serving(2, "d"), 0.0)


def test_a_late_registration_does_not_take_back_what_was_acknowledged() -> None:
    state = new_state()
    first = publish(state, 1)
    state.register("e", "s", 0.0)
    state.acknowledge("e", "s", 1, first, 0.0)
    state.rejoin("e", "s", None, 0.0)
    assert state.explorers["e"].version == 1


def test_a_new_process_replaces_the_one_before_which_is_told_so_for_good() -> None:
    state = new_state()
    state.register("e", "old", 0.0)
    state.register("e", "new", 1.0)
    with pytest.raises(ExplorerReplacedError, match="another process registered as explorer e"):
        state.renew("e", "old", 2.0)
    with pytest.raises(ExplorerReplacedError):
        state.rejoin("e", "old", None, 2.0)
    state.leave("e", 2.0, "old")
    assert state.explorers["e"].session == "new"
    state.leave("e", 2.0, "new")
    with pytest.raises(UnknownExplorerError):
        state.renew("e", "new", 3.0)


def test_the_place_of_a_lost_process_may_be_taken_by_one_that_returns() -> None:
    state = new_state()
    state.register("e", "new", 0.0)
    state.expire(LEASE)
    state.rejoin("e", "old", None, 11.0)
    assert state.explorers["e"].session == "old"


def test_a_suspended_clock_reader_loses_no_explorer() -> None:
    state = new_state()
    state.register("e", "s", 0.0)
    state.roster.extend(100.0)
    assert state.expire(100.0) == []
    assert state.expire(110.0) == ["e"]


def test_the_lost_do_not_pile_up() -> None:
    state = new_state()
    for number in range(200):
        state.register(f"e{number}", "s", float(number))
        state.expire(number + LEASE)
    assert len(state.explorers) == 64
    assert "e199" in state.explorers


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 7.0)), max_size=60))
def test_an_explorer_is_lost_if_and_only_if_it_was_silent_for_a_lease(
    words: list[tuple[str, float]],
) -> None:
    state, now = new_state(), 0.0
    spoke = dict.fromkeys("abc", 0.0)
    for name in spoke:
        state.register(name, "s", now)
    for name, seconds in words:
        now += seconds
        state.expire(now)
        for other, last in spoke.items():
            assert (state.explorers[other].status == LOST) == (last + LEASE <= now)
        try:
            state.renew(name, "s", now)
        except ExplorerLostError:
            state.rejoin(name, "s", None, now)
        spoke[name] = now


@pytest.mark.parametrize("name", ["", "x" * 129, "a\udc80", 1, None])
def test_an_id_that_the_monitor_would_refuse_is_refused_and_hides_no_explorer(name: str) -> None:
    state = new_state()
    state.register("x" * 128, "s", 0.0)
    publish(state, 1)
    expected = "an explorer's id is a string of 1 to 128 Unicode characters, got "
    with pytest.raises(UnknownExplorerError, match=expected):
        state.register(name, "s", 0.0)
    with pytest.raises(UnknownExplorerError, match=expected):
        state.rejoin(name, "s", None, 0.0)
    assert [e.id for e in weights_report(state).explorers] == ["x" * 128]


def test_a_cause_that_is_no_text_is_told_as_far_as_it_is() -> None:
    state = new_state()
    state.register("e", "s", 0.0)
    publish(state, 1)
    state.give_up("e", "no file \udc80.bin", 1.0)
    (said,) = weights_report(state).explorers
    assert said.message == "no file ?.bin"


def test_a_registration_that_comes_twice_changes_nothing() -> None:
    state = new_state()
    state.register("far", "s", 0.0)
    digest = publish(state, 1)
    state.acknowledge("far", "s", 1, digest, 1.0)
    state.register("far", "s", 2.0)
    assert state.explorers["far"].version == 1
    assert state.roster.next_expiry() == 2.0 + LEASE
    state.register("far", "another", 3.0)
    assert state.explorers["far"].version == -1, "a new process has nothing"
