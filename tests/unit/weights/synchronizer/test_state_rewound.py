"""`WeightsState` after trainers were restarted in place: newer versions are no more."""

import pytest
from trainsync.weights.errors import StaleVersionError, SupersededTrainerError
from trainsync.weights.synchronizer.failover_state import FailoverState, StateChanges, rebuild
from trainsync.weights.synchronizer.roster import RUNNING, STOPPED, Serving
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import Announcement, HeldPart, PartMeta, Published


def part(digest: str = "d") -> PartMeta:
    return PartMeta(0, 1, 10, digest, b"[]")


def publish(state: WeightsState, version: int, digest: str = "d", payload: str = "ref") -> str:
    assert state.upload(version, part(digest), payload, 0.0)
    assert state.versions.published is not None
    return state.versions.published.meta.digest


def serving(version: int) -> WeightsState:
    """A state with this version, which an explorer serves."""
    state = WeightsState()
    state.register("a", "process", 0.0)
    digest = publish(state, version)
    state.acknowledge("a", "process", version, digest, 0.0)
    return state


def test_versions_of_lost_steps_are_published_again_and_taken_again() -> None:
    state = serving(13)
    assert state.rewind(1, 10)
    assert state.versions.published is None
    assert state.explorers["a"].version == -1
    with pytest.raises(StaleVersionError):
        state.upload(9, part(), "ref", 0.0)
    for version in (10, 11, 12, 13):
        digest = publish(state, version, f"new{version}")
        state.acknowledge("a", "process", version, digest, 0.0, restarts=1)
        assert state.explorers["a"].version == version


def test_what_an_explorer_still_says_of_a_lost_version_is_passed_over() -> None:
    state = serving(13)
    state.rewind(1, 10)
    lost = Serving(13, "d13")
    state.renew("a", "process", 1.0, lost)
    state.acknowledge("a", "process", 13, "d13", 1.0)
    assert state.explorers["a"].version == -1
    publish(state, 10)
    state.rejoin("a", "process", lost, 1.0)
    assert state.explorers["a"].version == -1
    publish(state, 11)
    state.renew("a", "process", 1.0, lost)
    assert state.explorers["a"].version == -1


def test_an_explorer_that_took_a_lost_version_meanwhile_serves_none() -> None:
    state = serving(10)
    lost = publish(state, 11, "lost")  # which the explorer begins to load
    state.rewind(1, 10)
    assert state.explorers["a"].version == 10
    state.acknowledge("a", "process", 11, lost, 1.0)
    assert state.explorers["a"].version == -1
    state.renew("a", "process", 1.0, Serving(10, "d"))  # on its way since before
    assert state.explorers["a"].version == -1
    for _ in range(2):
        state.rejoin("a", "process", Serving(11, lost), 1.0)
        assert state.explorers["a"].version == -1
    digest = publish(state, 10)
    state.acknowledge("a", "process", 10, digest, 1.0, restarts=1)
    assert state.explorers["a"].version == 10
    state.renew("a", "process", 1.0, Serving(11, lost))
    assert state.explorers["a"].version == 10


def test_a_lost_version_is_not_believed_once_its_number_is_published_again() -> None:
    state = serving(13)
    lost = Serving(13, "d13")
    state.rewind(1, 10)
    for version in (10, 11, 12, 13, 14):
        publish(state, version, f"new{version}")
    state.renew("a", "process", 1.0, lost)
    assert state.explorers["a"].version == -1
    state.rejoin("a", "process", lost, 1.0)
    assert state.explorers["a"].version == -1
    state.register("a", "another process", 2.0)
    state.rejoin("b", "b", lost, 2.0)
    assert state.explorers["b"].version == -1


def test_what_was_lost_stays_lost_after_another_restart_from_a_later_step() -> None:
    state = serving(13)
    state.rewind(1, 10)
    for version in range(10, 16):
        digest = publish(state, version, f"new{version}")
    state.rewind(2, 15)
    state.renew("a", "process", 1.0, Serving(13, "d13"))
    state.rejoin("b", "b", Serving(13, "d13"), 1.0)
    assert state.explorers["a"].version == state.explorers["b"].version == -1
    state.renew("a", "process", 1.0, Serving(15, digest, restarts=1))
    assert state.explorers["a"].version == 15


def test_a_version_of_before_the_step_is_acknowledged_late() -> None:
    state = serving(9)
    digest = publish(state, 10)
    publish(state, 11)
    state.rewind(1, 10)
    state.acknowledge("a", "process", 10, digest, 1.0)
    assert state.explorers["a"].version == 10
    publish(state, 10, "called otherwise")


def test_versions_of_trainers_that_were_restarted_are_newer_than_all_from_before() -> None:
    state = serving(13)
    state.rewind(1, 10)
    assert not state.versions.has_newer(13)
    publish(state, 10)
    assert state.versions.has_newer(13)
    assert not state.versions.has_newer(10, restarts=1)


def test_an_explorer_that_serves_the_step_goes_on_and_may_be_sent_it_once_more() -> None:
    state = serving(10)
    assert state.rewind(1, 10)
    assert state.version == 10
    assert state.explorers["a"].version == 10
    publish(state, 10, "called otherwise", "other bytes")
    assert state.versions.published is not None
    assert state.versions.published.payloads == ("other bytes",)
    with pytest.raises(StaleVersionError):
        state.upload(10, part(), "a third time", 0.0)


def test_an_older_version_stays_with_those_that_have_it() -> None:
    state = serving(8)
    state.rewind(1, 10)
    assert (state.version, state.explorers["a"].version) == (8, 8)
    with pytest.raises(StaleVersionError):
        state.upload(8, part(), "ref", 0.0)
    publish(state, 10)


def test_the_same_restart_again_changes_nothing() -> None:
    state = serving(13)
    state.set_trainer_status(STOPPED)
    assert state.rewind(1, 10)
    assert state.trainer_status == RUNNING
    publish(state, 11)
    assert not state.rewind(1, 10)
    assert state.version == 11


def test_a_state_that_is_rebuilt_after_a_restart_remembers_it() -> None:
    state = serving(13)
    kept = FailoverState(-1)
    kept.apply(changes(state, 1, 13))
    state.rewind(1, 10)
    publish(state, 10, payload="new")
    kept.apply(changes(state, 2, 10))
    again = rebuild(kept.remembered(), 30.0, 0.0)
    assert again.version == 10
    assert again.versions.published is not None
    assert again.versions.published.payloads == ("new",)
    again.renew("a", "process", 1.0, Serving(13, "d13"))
    assert again.explorers["a"].version == -1
    assert not again.rewind(1, 10)


def test_a_state_that_is_rebuilt_before_the_step_is_published_again_takes_it() -> None:
    state = serving(10)
    kept = FailoverState(-1)
    kept.apply(changes(state, 1, 10))
    state.rewind(1, 10)
    kept.apply(changes(state, 2))
    again = rebuild(kept.remembered(), 30.0, 0.0)
    assert not again.versions.has_newer(10)
    assert again.upload(10, part(), "new", 0.0)
    assert again.versions.has_newer(10)
    with pytest.raises(StaleVersionError):
        again.upload(10, part(), "a third time", 0.0)


def test_a_step_that_is_announced_again_is_kept_by_its_new_digest() -> None:
    state = WeightsState()
    kept = FailoverState(-1)
    state.announce(Announcement(Published.broadcast(10, "before", 5)), 0.0)
    kept.apply(changes(state, 1))
    state.rewind(1, 10)
    kept.apply(changes(state, 2))
    state.announce(Announcement(Published.broadcast(10, "after", 5)), 0.0)
    kept.apply(changes(state, 3))
    again = rebuild(kept.remembered(), 30.0, 0.0)
    assert again.versions.published == state.versions.published
    with pytest.raises(StaleVersionError):
        again.announce(Announcement(Published.broadcast(10, "a third", 5)), 0.0)


def test_trainers_from_before_the_restart_are_refused() -> None:
    state = serving(13)
    state.check_trainer(0)
    state.rewind(1, 10)
    with pytest.raises(SupersededTrainerError, match="made anew"):
        state.check_trainer(0)
    state.check_trainer(1)
    state.check_trainer(None)  # of an older library


def test_versions_aborted_before_the_step_are_no_matter_once_it_is_published_anew() -> None:
    state = serving(3)
    state.versions.note_aborted(4, "a test")
    publish(state, 5)
    state.rewind(1, 4)
    assert state.versions.published is None
    assert state.versions.aborted == {}


def changes(state: WeightsState, revision: int, version: int | None = None) -> StateChanges:
    """With the part of ``version``, if one is given."""
    published = state.versions.published
    held: tuple[HeldPart, ...] = ()
    if version is not None:
        assert published is not None
        held = (HeldPart(version, part(), published.payloads[0]),)
    return StateChanges(
        revision,
        held,
        dict(state.explorers),
        state.trainer_status,
        state.versions.announced,
        rewinds=state.rewinds,
        restarts=state.versions.restarts,
        reopened=state.versions.reopened,
    )
