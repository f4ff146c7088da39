"""`WeightsState`: versions only go up, parts make versions, explorers acknowledge."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    StaleVersionError,
    UnknownExplorerError,
)
from trainsync.weights.synchronizer.roster import REQUIRE_SYNC, RUNNING, STOPPED
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import PartMeta, version_digest


def part(rank: int, world_size: int = 2, digest: str = "d") -> PartMeta:
    return PartMeta(rank, world_size, 10, digest, b"[]")


def publish(state: WeightsState, version: int, now: float = 0.0) -> str:
    assert state.upload(version, part(0, 1), f"ref{version}", now)
    assert state.versions.published is not None
    return state.versions.published.meta.digest


def test_a_version_without_a_tensor_is_not_published() -> None:
    state = WeightsState()
    state.upload(1, PartMeta(0, 2, 0, "d", b"[]"), "a", 0.0)
    with pytest.raises(InconsistentUploadError, match="version 1 has no tensor"):
        state.upload(1, PartMeta(1, 2, 0, "d", b"[]"), "b", 0.0)
    assert state.versions.published is None
    state.upload(1, PartMeta(0, 2, 0, "d", b"[]"), "a", 0.0)
    assert state.upload(1, PartMeta(1, 2, 4, "d", b"[[]]"), "b", 0.0), "one rank has all of it"


def test_a_version_is_published_when_every_rank_has_sent_its_part() -> None:
    state = WeightsState()
    assert not state.upload(3, part(1), "b", 0.0)
    assert state.versions.published is None
    assert state.upload(3, part(0), "a", 0.0)
    assert state.versions.published is not None
    assert state.versions.published.payloads == ("a", "b")
    assert [p.rank for p in state.versions.published.meta.parts] == [0, 1]
    assert state.versions.published.meta.bytes == 20


@pytest.mark.parametrize("version", [-1, 0, 4, 5])
def test_an_older_or_equal_version_is_refused(version: int) -> None:
    state = WeightsState()
    publish(state, 5)
    with pytest.raises(StaleVersionError, match=f"version {version}, but version 5 is"):
        state.upload(version, part(0, 1), "x", 0.0)
    assert state.version == 5


def test_an_attempt_that_resumes_never_publishes_below_its_first_step() -> None:
    state = WeightsState(floor=34)
    with pytest.raises(StaleVersionError):
        state.upload(34, part(0, 1), "x", 0.0)
    publish(state, 35)


def test_a_rank_that_sends_twice_is_refused() -> None:
    state = WeightsState()
    state.upload(1, part(0), "a", 0.0)
    with pytest.raises(InconsistentUploadError, match="rank 0 uploaded it already"):
        state.upload(1, part(0), "a", 0.0)


def test_ranks_that_disagree_on_the_world_size_are_refused() -> None:
    state = WeightsState()
    state.upload(1, part(0, 2), "a", 0.0)
    with pytest.raises(InconsistentUploadError, match="rank 1 says 3 ranks, rank 0 says 2"):
        state.upload(1, part(1, 3), "b", 0.0)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(InconsistentUploadError, match="rank 2 is not in"):
        WeightsState().upload(1, part(2, 2), "a", 0.0)


def test_incomplete_versions_do_not_pile_up() -> None:
    state = WeightsState()
    for version in range(100):
        state.upload(version, part(0), "a", 0.0)
    assert state.upload(99, part(1), "b", 0.0)
    assert not state.upload(100, part(1), "b", 0.0)
    assert state.version == 99


def test_an_incomplete_version_is_dropped_when_a_newer_one_is_published() -> None:
    state = WeightsState()
    state.upload(1, part(0), "a", 0.0)
    state.upload(2, part(0), "a", 0.0)
    state.upload(2, part(1), "b", 0.0)
    with pytest.raises(StaleVersionError):
        state.upload(1, part(1), "b", 0.0)


def test_an_acknowledgement_needs_the_digest_of_the_version() -> None:
    state = WeightsState()
    digest = publish(state, 1)
    state.register("e", "s", 0.0)
    with pytest.raises(DigestMismatchError, match="explorer e has other"):
        state.acknowledge("e", "s", 1, "other", 0.0)
    assert state.explorers["e"].status == REQUIRE_SYNC
    assert state.explorers["e"].version == -1
    state.acknowledge("e", "s", 1, digest, 0.0)
    assert (state.explorers["e"].version, state.explorers["e"].status) == (1, RUNNING)


def test_a_late_acknowledgement_of_a_replaced_version_is_taken() -> None:
    state = WeightsState()
    old = publish(state, 1)
    state.register("e", "s", 0.0)
    publish(state, 2)
    state.acknowledge("e", "s", 1, old, 0.0)
    assert state.explorers["e"].version == 1
    assert state.lag("e") == 1


def test_an_acknowledgement_never_goes_back_nor_ahead() -> None:
    state = WeightsState()
    first, second = publish(state, 1), publish(state, 2)
    state.register("e", "s", 0.0)
    state.acknowledge("e", "s", 2, second, 0.0)
    with pytest.raises(StaleVersionError, match="version 1 after 2"):
        state.acknowledge("e", "s", 1, first, 0.0)
    with pytest.raises(StaleVersionError, match="newest is 2"):
        state.acknowledge("e", "s", 3, second, 0.0)


def test_an_unregistered_explorer_is_unknown() -> None:
    state = WeightsState()
    state.register("here", "s", 0.0)
    with pytest.raises(UnknownExplorerError, match=r"'gone' is not registered.*\['here'\]"):
        state.acknowledge("gone", "s", 1, "d", 0.0)
    with pytest.raises(UnknownExplorerError):
        state.set_explorer_status("gone", "s", RUNNING, 0.0)


def test_an_explorer_that_comes_back_has_nothing_loaded() -> None:
    state = WeightsState()
    digest = publish(state, 1)
    state.register("e", "s", 0.0)
    state.acknowledge("e", "s", 1, digest, 0.0)
    state.register("e", "another process", 0.0)
    assert state.explorers["e"].version == -1


def test_leaving_twice_is_no_error() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    state.leave("e", 0.0)
    state.leave("e", 0.0)
    assert state.explorers == {}


@pytest.mark.parametrize("status", ["", "RUNNING", "dead"])
def test_a_status_that_is_none_is_refused(status: str) -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    with pytest.raises(ValueError, match="status must be one of"):
        state.set_explorer_status("e", "s", status, 0.0)
    with pytest.raises(ValueError, match="status must be one of"):
        state.set_trainer_status(status)


def test_a_synchronisation_ends_when_the_last_explorer_serves_the_version() -> None:
    state = WeightsState()
    for name in ("a", "b", "gone"):
        state.register(name, "s", 0.0)
    state.upload(1, part(0), "x", 10.0)
    state.upload(1, part(1), "y", 11.0)
    digest = version_digest(1, (part(0), part(1)))
    state.acknowledge("a", "s", 1, digest, 12.0)
    state.acknowledge("b", "s", 1, digest, 13.0)
    assert state.clock.counts.last_duration is None
    state.set_explorer_status("gone", "s", STOPPED, 14.0)
    assert state.clock.counts.last_duration == 4.0


def test_a_synchronisation_lasts_from_the_begin_of_the_upload_that_began_first() -> None:
    state = WeightsState()
    state.register("e", "s", 0.0)
    state.upload(1, part(0), "x", 10.0, seconds=0.5)
    state.upload(1, part(1), "y", 11.0, seconds=3.0)
    state.acknowledge("e", "s", 1, version_digest(1, (part(0), part(1))), 12.0)
    assert state.clock.counts.last_duration == 4.0


def test_a_version_that_no_explorer_takes_counts_as_no_synchronisation() -> None:
    state = WeightsState()
    publish(state, 1)
    assert (state.clock.counts.syncs, state.clock.counts.last_duration) == (0, None)
    state.register("lost", "s", 0.0)
    state.give_up("lost", "it is silent", 2.0)
    publish(state, 2, now=3.0)
    assert state.clock.counts.syncs == 0
    state.register("e", "s", 4.0)
    digest = publish(state, 3, now=5.0)
    state.acknowledge("e", "s", 3, digest, 7.0)
    assert (state.clock.counts.syncs, state.clock.counts.last_duration) == (1, 2.0)


def test_the_digest_of_a_version_depends_on_everything_in_it() -> None:
    parts = (part(0), part(1))
    digests = {
        version_digest(1, parts),
        version_digest(2, parts),
        version_digest(1, parts[::-1]),
        version_digest(1, (part(0, digest="e"), part(1))),
        version_digest(1, (PartMeta(0, 2, 10, "d", b"[1]"), part(1))),
    }
    assert len(digests) == 5


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=60))
def test_whatever_the_order_of_uploads_versions_only_go_up_and_are_complete(
    uploads: list[tuple[int, int]],
) -> None:
    state = WeightsState()
    seen = state.version
    for version, rank in uploads:
        with contextlib.suppress(StaleVersionError, InconsistentUploadError):
            state.upload(version, part(rank, 3), (version, rank), 0.0)
        assert state.version >= seen
        seen = state.version
        if state.versions.published is not None:
            assert state.versions.published.payloads == tuple((seen, r) for r in range(3))
