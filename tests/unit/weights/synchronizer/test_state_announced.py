"""`WeightsState`: announced versions; lost explorers are not awaited."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
)
from trainsync.weights.synchronizer.failover_state import FailoverState, StateChanges, rebuild
from trainsync.weights.synchronizer.report import weights_report
from trainsync.weights.synchronizer.roster import LOST, REQUIRE_SYNC, RUNNING, LossReason, Serving
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import (
    Announcement,
    CheckpointLocation,
    PartMeta,
    Published,
    VersionMeta,
)


def broadcast(version: int, digest: str = "d") -> Published:
    return Published(VersionMeta(version, digest, (), "nccl", 100))


def saved(version: int, attempt: int = 0) -> Published:
    location = CheckpointLocation(f"global_step_{version}", "sha256:0", attempt, version)
    return Published(VersionMeta(version, f"d{version}", (), "checkpoint", 100), (), location)


def state_with(*explorers: str, version: int | None = None) -> WeightsState:
    state = WeightsState()
    for name in explorers:
        state.register(name, "s", 0.0)
    if version is not None:
        state.announce(Announcement(broadcast(version), 1.0), 0.0)
    return state


def rebuilt(state: WeightsState) -> WeightsState:
    failover = FailoverState(-1)
    failover.apply(
        StateChanges(
            9,
            (),
            dict(state.explorers),
            state.trainer_status,
            state.versions.announced,
            state.group,
            state.clock.counts,
            dict(state.roster.losses),
            missed=state.versions.missed,
            traffic=state.traffic,
            aborted=dict(state.versions.aborted),
        )
    )
    return rebuild(failover.remembered(), 10.0, 100.0)


def test_an_announced_version_is_published_and_lasts_until_all_explorers_serve_it() -> None:
    state = state_with("a", "b")
    state.announce(Announcement(broadcast(3), 2.0), 10.0)
    assert state.versions.published == broadcast(3) == state.versions.announced
    state.acknowledge("a", "s", 3, "d", 11.0)
    assert state.clock.counts.syncs == 0
    state.acknowledge("b", "s", 3, "d", 12.0)
    assert (state.clock.counts.syncs, state.clock.counts.last_duration) == (1, 4.0)


@pytest.mark.parametrize("version", [-1, 4, 5])
def test_an_older_or_equal_version_is_refused(version: int) -> None:
    state = state_with(version=5)
    with pytest.raises(StaleVersionError, match=f"version {version} is announced, but version 5"):
        state.announce(Announcement(broadcast(version)), 0.0)
    with pytest.raises(StaleVersionError, match="already published"):
        state.upload(version, PartMeta(0, 1, 10, "d", b"[]"), "ref", 0.0)
    assert state.versions.published == broadcast(5)


def test_an_announcement_may_come_again_but_not_with_other_bytes() -> None:
    state = state_with(version=5)
    state.announce(Announcement(broadcast(5), again=True), 0.0)
    with pytest.raises(StaleVersionError):
        state.announce(Announcement(broadcast(5, "other"), again=True), 0.0)


def test_a_repeated_announcement_names_lost_and_refusing_explorers() -> None:
    state = state_with("dead", "misfit", "good", version=5)
    lost, refused = {"dead": "it died"}, {"misfit": "w is too large"}
    for _ in range(2):
        state.announce(Announcement(broadcast(5), lost=lost, refused=refused, again=True), 1.0)
    assert (state.explorers["dead"].status, state.explorers["dead"].cause) == (LOST, "it died")
    assert state.explorers["misfit"].cause == "w is too large"
    assert state.roster.behind(5) == ["good"]
    assert state.roster.losses == {LossReason.TRANSFER: 1, LossReason.REFUSED: 1}, (
        "nobody counts twice"
    )


def test_a_repeated_announcement_of_a_loss_ends_the_synchronisation() -> None:
    state = state_with("e", "good", version=5)
    state.acknowledge("good", "s", 5, "d", 0.5)
    assert state.clock.counts.syncs == 0
    state.announce(Announcement(broadcast(5), lost={"e": "it died"}, again=True), 1.0)
    assert state.clock.counts.syncs == 1


def test_the_trainer_does_not_wait_for_a_connected_explorer_without_the_broadcast() -> None:
    state = state_with("got", "missed")
    state.announce(Announcement(broadcast(1), served=["got", "left"]), 0.0)
    assert state.roster.behind(1) == ["got"]
    assert rebuilt(state).roster.behind(1) == ["got"]
    state.acknowledge("got", "s", 1, "d", 0.0)
    state.announce(Announcement(broadcast(2), served=["got", "missed"]), 0.0)
    state.acknowledge("missed", "s", 2, "d", 0.0)
    assert state.roster.behind(2) == ["got"]


def test_all_explorers_are_awaited_if_the_announcement_names_no_receivers() -> None:
    state = state_with("a")
    state.announce(Announcement(saved(1)), 0.0)
    assert state.roster.behind(1) == ["a"]


def test_a_version_that_reached_no_explorer_counts_for_lag_also_in_a_rebuilt_state() -> None:
    state = state_with("e", "dead")
    assert state.versions.offered == -1
    state.note_missed(4, 0.0, {"dead": "it died", "gone": "it left"}, {"e": "no memory"})
    for known in (state, rebuilt(state)):
        assert (known.version, known.versions.offered, known.lag("e")) == (-1, 4, 5)
    assert state.roster.losses == {LossReason.TRANSFER: 1, LossReason.REFUSED: 1}
    state.announce(Announcement(broadcast(5)), 0.0)
    assert state.roster.behind(5) == ["e"], "it can still take the next one"


def test_another_connection_has_another_number_also_in_a_rebuilt_state() -> None:
    state = state_with("a", "b")
    seen = []
    for name in ("a", "b", "a"):
        state.renew(name, "s", 0.0, ready=False)
        state.renew(name, "s", 0.0, ready=True)
        state.renew(name, "s", 0.0, ready=True)
        seen.append(state.explorers[name].link)
    again = rebuilt(state)
    again.renew("b", "s", 0.0, ready=False)
    again.renew("b", "s", 0.0, ready=True)
    assert [*seen, again.explorers["b"].link] == [1, 2, 3, 4]


def test_an_attempt_that_was_superseded_announces_nothing() -> None:
    state = WeightsState()
    state.announce(Announcement(saved(1, attempt=2)), 0.0)
    with pytest.raises(SupersededTrainerError, match=r"attempt 1 announces version 2.*attempt 2"):
        state.announce(Announcement(saved(2, attempt=1)), 0.0)
    assert state.version == 1
    state.announce(Announcement(saved(2, attempt=2)), 0.0)


def test_lost_explorers_are_given_up_and_refusing_ones_live_and_neither_is_awaited() -> None:
    state = state_with("good", "dead", "misfit")
    state.announce(
        Announcement(
            broadcast(1),
            0.5,
            lost={"dead": "its connection ended", "gone": "it left"},
            refused={"misfit": "w: shape (2,), expected (3,)"},
        ),
        1.0,
    )
    assert state.explorers["dead"].status == LOST
    assert state.explorers["misfit"].status == RUNNING
    assert state.roster.behind(1) == ["good"]
    state.acknowledge("good", "s", 1, "d", 2.0)
    assert state.clock.counts.syncs == 1
    said = {e.id: (e.state, e.message) for e in weights_report(state).explorers}
    assert said["dead"] == (LOST, "its connection ended")
    assert said["misfit"] == (RUNNING, "w: shape (2,), expected (3,)")
    assert said["good"] == (RUNNING, None)
    assert weights_report(state).losses == {
        "silent": 0,
        "transfer": 1,
        "not_ready": 0,
        "quarantined": 0,
        "refused": 1,
    }
    assert state.roster.losses == {LossReason.TRANSFER: 1, LossReason.REFUSED: 1}


def test_a_version_is_announced_however_many_explorers_were_lost_with_it() -> None:
    names = [f"e{number}" for number in range(100)]
    state = state_with(*names)
    for name in names[30:]:
        state.renew(name, "s", 20.0)
    assert len(state.expire(31.0)) == 30
    state.announce(
        Announcement(broadcast(1), 1.0, lost=dict.fromkeys(names, "cut off"), served=[]), 32.0
    )
    assert state.versions.published == broadcast(1)
    assert {known.status for known in state.explorers.values()} == {LOST}
    assert state.roster.losses[LossReason.TRANSFER] == 70, "the others were lost before"


def test_an_explorer_that_refused_a_version_is_awaited_again_after_taking_the_next() -> None:
    state = state_with("e")
    state.announce(Announcement(broadcast(1), refused={"e": "no"}), 0.0)
    state.announce(Announcement(broadcast(2)), 0.0)
    state.acknowledge("e", "s", 2, "d", 0.0)
    assert state.explorers["e"].cause is None
    assert state.roster.behind(3) == ["e"]


def test_an_explorer_that_joins_after_the_broadcast_is_not_awaited_before_catching_up() -> None:
    state = state_with(version=4)
    state.register("late", "s", 0.0)
    assert state.roster.behind(4) == []
    state.announce(Announcement(broadcast(5)), 0.0)
    state.acknowledge("late", "s", 5, "d", 0.0)
    assert state.roster.behind(6) == ["late"]


def test_an_explorer_that_has_other_bytes_than_were_announced_is_refused() -> None:
    state = state_with("e", version=1)
    with pytest.raises(DigestMismatchError):
        state.acknowledge("e", "s", 1, "other", 0.0)
    assert state.explorers["e"].status == REQUIRE_SYNC
    again = rebuilt(state)
    again.rejoin("e", "s", Serving(2, "x"), 0.0)
    with pytest.raises(InconsistentUploadError, match="explorer e already serves a version 2"):
        again.announce(Announcement(broadcast(2, "y")), 0.0)


def test_a_connected_explorer_is_ready_until_the_trainer_listens_elsewhere() -> None:
    state = state_with("a", "b")
    assert state.renew("a", "s", 0.0, ready=True)
    assert not state.renew("a", "s", 0.0, ready=True)
    assert (state.roster.ready(0), state.roster.unready(0)) == (["a"], ["b"])
    state.set_group(TrainerEndpoint("h", 1, 0, "t"))
    assert state.roster.ready(0) == []
    state.renew("a", "s", 0.0, ready=True)
    state.set_group(TrainerEndpoint("h", 1, 0, "t"))
    assert state.roster.ready(0) == ["a"], "the same group again changes nothing"
    state.give_up("a", "gone", 0.0)
    assert state.roster.ready(0) == []


def test_of_two_trainers_that_claim_a_run_the_older_attempt_is_refused() -> None:
    state = WeightsState()
    state.set_group(TrainerEndpoint("new", 1, 3, "t"))
    with pytest.raises(SupersededTrainerError, match=r"attempt 3 broadcasts already.* attempt 2"):
        state.set_group(TrainerEndpoint("old", 1, 2, "t"))
    assert state.group == TrainerEndpoint("new", 1, 3, "t")


def test_a_rebuilt_state_knows_the_announced_version_the_group_and_the_counts() -> None:
    state = state_with("a", "b", version=6)
    state.set_group(TrainerEndpoint("h", 1, 0, "t"))
    state.acknowledge("a", "s", 6, "d", 0.0)
    state.give_up("b", "gone", 3.0)
    again = rebuilt(state)
    assert again.versions.published == broadcast(6)
    assert again.group == state.group
    assert again.clock.counts == state.clock.counts
    assert again.clock.counts.syncs == 1
    assert again.roster.losses == {LossReason.QUARANTINED: 1}
    with pytest.raises(StaleVersionError):
        again.announce(Announcement(broadcast(6, "other")), 0.0)


@pytest.mark.parametrize(
    ("method", "location"),
    [
        ("memory", None),
        ("pigeon", None),
        ("checkpoint", None),
        ("nccl", CheckpointLocation("p", "d", 0, 1)),
    ],
)
def test_only_a_version_that_can_be_found_is_announced(method: str, location: Any) -> None:
    published = Published(VersionMeta(1, "d", (), method, 10), (), location)
    with pytest.raises(ValueError, match="announced with method nccl or store, or with checkpoint"):
        Announcement(published)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("announce"), st.integers(0, 9)),
            st.tuples(st.just("upload"), st.integers(0, 9)),
            st.tuples(st.just("rebuild"), st.just(0)),
        ),
        max_size=20,
    )
)
def test_no_version_goes_back_whatever_is_announced_or_uploaded_or_rebuilt(
    steps: list[tuple[str, int]],
) -> None:
    state, failover = WeightsState(), FailoverState(-1)
    parts: list[Any] = []
    newest = -1
    for what, version in steps:
        with contextlib.suppress(StaleVersionError):
            if what == "announce":
                state.announce(Announcement(broadcast(version, f"{version}")), 0.0)
            elif what == "upload":
                state.upload(version, PartMeta(0, 1, 10, "d", b"[]"), version, 0.0)
        if what == "rebuild":
            state = rebuild(failover.remembered(), 10.0, 0.0)
        parts = [row for row in state.versions.held() if row.version == state.version]
        failover.apply(StateChanges(1, tuple(parts), {}, RUNNING, state.versions.announced))
        assert state.version >= newest
        newest = state.version
        assert (newest == -1) == (state.versions.published is None)


def test_an_aborted_version_is_remembered_while_an_explorer_may_skip_it() -> None:
    state = state_with("e")
    state.announce(Announcement(saved(1)), 0.0)
    assert state.versions.note_aborted(2, "no space left" + 1000 * " ")
    assert not state.versions.note_aborted(2, "again")
    assert not state.versions.note_aborted(1, "late"), "it is published"
    state = rebuilt(state)
    assert state.versions.aborted == {2: f"{'no space left':512}"}
    state.announce(Announcement(saved(3)), 0.0)
    assert list(state.versions.aborted) == [2], "an explorer may still serve version 1"
    state.announce(Announcement(saved(4)), 0.0)
    assert not state.versions.aborted


def test_an_aborted_version_shows_as_what_explorers_lag_behind() -> None:
    state = state_with("e")
    assert state.versions.note_aborted(0, "no space left")
    assert weights_report(state).method == "checkpoint"
    state.announce(Announcement(saved(1)), 0.0)
    state.acknowledge("e", "s", 1, "d1", 0.0)
    state.versions.note_aborted(3, "no space left")
    assert (state.lag("e"), weights_report(state).trainer_version) == (2, 3)
    assert state.roster.behind(state.version) == [], "nobody waits for it"
