"""Whatever the speeds, joins, leaves and deaths: no dead-lock, and staleness as promised."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.api.spec import SyncStyle
from trainsync.weights.pacing.policy import SyncPolicy

from tests.unit.weights.synchronizer.sync_simulation import LEASE, Change, Sim, durations

STEPS = 12

speed = st.floats(0.1, 10.0)
intervals = st.integers(1, 4)
fixed = intervals.flatmap(
    lambda n: st.builds(SyncPolicy, st.just(SyncStyle.FIXED), st.just(n), offset=st.integers(0, n))
)
by_trainer = st.builds(SyncPolicy, st.just(SyncStyle.TRAINER_DRIVEN), intervals)
by_explorer = st.builds(SyncPolicy, st.just(SyncStyle.EXPLORER_DRIVEN), intervals)
fully_async = intervals.flatmap(
    lambda n: st.builds(
        SyncPolicy,
        st.just(SyncStyle.FULLY_ASYNC),
        st.just(n),
        max_staleness=st.integers(n - 1, 6),
        batches_per_step=st.integers(1, 3),
    )
)
STYLES = {
    "fixed": fixed,
    "trainer_driven": by_trainer,
    "explorer_driven": by_explorer,
    "fully_async": fully_async,
}
change = st.builds(
    Change,
    at=st.floats(0.0, 150.0),
    kind=st.sampled_from(["join", "leave", "die", "pause"]),
    name=st.sampled_from("abcd"),
    seconds=st.floats(0.1, 3 * LEASE),
)


# Whether each version after the first is aborted; those that are not drawn are not.
outcomes = st.lists(st.booleans(), max_size=2 * STEPS)


def simulate(
    policy: SyncPolicy,
    changes: tuple[Change, ...],
    data: st.DataObject,
    aborts: Iterable[bool] = (),
) -> Sim:
    drawn = durations(data.draw(st.lists(speed, min_size=1, max_size=20), label="durations"))
    batches = policy.batches_per_step
    if policy.style in (SyncStyle.TRAINER_DRIVEN, SyncStyle.EXPLORER_DRIVEN):
        batches = data.draw(st.integers(1, 3), label="batches per step")
    first = data.draw(st.integers(0, 5), label="first step")
    fates = iter(aborts)
    sim = Sim(
        policy, first, STEPS, lambda: next(drawn), changes, batches, lambda: next(fates, False)
    )
    sim.run()
    return sim


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_pair_of_trainer_and_explorers_dead_locks_and_staleness_is_bounded(
    style: str, data: st.DataObject
) -> None:
    policy = data.draw(STYLES[style])
    present = tuple(
        Change(0.0, "join", name)
        for name in data.draw(st.sets(st.sampled_from("abcd"), min_size=1))
    )
    changes = present + tuple(data.draw(st.lists(change, max_size=12)))
    # An explorer joins late and stays, so that every run can end.
    last = Change(1000.0, "join", "last")
    sim = simulate(policy, (*changes, last), data)
    assert sim.trained == list(range(sim.first_step + 1, sim.first_step + STEPS + 1))


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_explorers_that_stay_need_no_newcomer_to_go_on(style: str, data: st.DataObject) -> None:
    policy = data.draw(STYLES[style])
    names = data.draw(st.sets(st.sampled_from("abcd"), min_size=1))
    joins = tuple(Change(0.0, "join", name) for name in names)
    sim = simulate(policy, joins, data)
    assert len(sim.trained) == STEPS
    assert not sim.joined_late


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_aborted_versions_block_no_explorer_and_add_a_bounded_staleness(
    style: str, data: st.DataObject
) -> None:
    policy = data.draw(STYLES[style])
    names = data.draw(st.sets(st.sampled_from("abcd"), min_size=1))
    joins = tuple(Change(0.0, "join", name) for name in names)
    changes = tuple(data.draw(st.lists(change, max_size=6)))
    last = Change(1000.0, "join", "last")
    sim = simulate(policy, (*joins, *changes, last), data, data.draw(outcomes))
    assert len(sim.trained) == STEPS


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_when_every_version_but_the_first_is_aborted_training_goes_on_with_that(
    style: str, data: st.DataObject
) -> None:
    policy = data.draw(STYLES[style])
    sim = simulate(policy, (Change(0.0, "join", "a"),), data, itertools.repeat(True))
    assert len(sim.trained) == STEPS
    assert len(sim.versions) == 1
