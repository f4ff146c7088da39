"""The books of the pace: no dead-lock whatever dies, nothing too old, nothing twice."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.api.protocol import SKIPPED
from trainsync.api.spec import SyncStyle
from trainsync.weights.errors import WeightsTimeoutError, WeightsUnavailableError
from trainsync.weights.pacing.aborted_limit import MOST_IN_A_ROW
from trainsync.weights.pacing.messages import TrainerOrder, TrainerPlan, Turn
from trainsync.weights.pacing.policy import ExplorerMove, SyncPolicy
from trainsync.weights.pacing.scheduler import PaceScheduler
from trainsync.weights.synchronizer.roster import LOST, LossReason, Roster

from tests.unit.weights.pacing.pacing_simulation import LEASE, Fault, Run

STEPS = 10
TIMEOUT = 30.0

intervals = st.integers(1, 3)
POLICIES = {
    SyncStyle.FIXED: intervals.flatmap(
        lambda n: st.builds(
            SyncPolicy,
            st.just(SyncStyle.FIXED),
            st.just(n),
            offset=st.integers(0, n),
            timeout=st.just(TIMEOUT),
        )
    ),
    SyncStyle.TRAINER_DRIVEN: st.builds(
        SyncPolicy, st.just(SyncStyle.TRAINER_DRIVEN), intervals, timeout=st.just(TIMEOUT)
    ),
    SyncStyle.EXPLORER_DRIVEN: st.builds(
        SyncPolicy, st.just(SyncStyle.EXPLORER_DRIVEN), intervals, timeout=st.just(TIMEOUT)
    ),
}
names = st.sampled_from(["a", "ab", "abc"]).map(tuple)
speeds = st.lists(st.floats(0.1, 5.0), min_size=1, max_size=12)
faults = st.lists(
    st.builds(
        Fault,
        at=st.floats(0.0, 30.0) | st.floats(0.0, 100.0),
        kind=st.sampled_from(["die", "quarantine", "rebuild", "restart"]),
        name=st.sampled_from("abc"),
        back=st.sampled_from([0, -1, -1, 1, 2]),
    ),
    max_size=6,
)


def plans(style: SyncStyle) -> st.SearchStrategy[TrainerPlan]:
    if style != SyncStyle.FULLY_ASYNC:
        return st.builds(TrainerPlan, POLICIES[style], st.integers(1, 3), st.booleans())
    return st.tuples(intervals, st.integers(0, 3), st.integers(1, 3), st.booleans()).map(
        lambda drawn: TrainerPlan(
            SyncPolicy(
                style,
                drawn[0],
                max_staleness=drawn[0] - 1 + drawn[1],
                batches_per_step=drawn[2],
                timeout=TIMEOUT,
            ),
            drawn[2],
            drawn[3],
        )
    )


@pytest.mark.parametrize("style", SyncStyle)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_run_comes_to_its_end_whatever_dies_and_staleness_is_bounded(
    style: SyncStyle, data: st.DataObject
) -> None:
    plan, drawn = data.draw(plans(style)), itertools.cycle(data.draw(speeds))
    run = Run(plan, data.draw(names), STEPS, drawn, tuple(data.draw(faults)))
    run.run()
    assert len(run.trained) == STEPS
    store = 2 * plan.batches * (1 + (plan.policy.max_staleness or plan.policy.interval))
    assert run.most_queued <= store + len(run.names) * (plan.policy.interval + plan.policy.offset)


def in_a_row(lost: list[bool]) -> list[bool]:
    """Not more of them than training does without."""
    return [drawn and number % 4 != 3 for number, drawn in enumerate(lost)]


@pytest.mark.parametrize("style", SyncStyle)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_run_goes_on_without_the_versions_whose_saves_are_aborted(
    style: SyncStyle, data: st.DataObject
) -> None:
    plan, drawn = data.draw(plans(style)), itertools.cycle(data.draw(speeds))
    lost = in_a_row(data.draw(st.lists(st.booleans(), max_size=STEPS)))
    run = Run(
        *(plan, data.draw(names), STEPS, drawn, tuple(data.draw(faults)), True, iter(lost)),
        most_lacking=MOST_IN_A_ROW,
    )
    run.run()
    assert len(run.trained) == STEPS


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_style_fixed_trains_on_the_same_batches_with_versions_aborted_whatever_the_speeds(
    data: st.DataObject,
) -> None:
    plan, explorers = data.draw(plans(SyncStyle.FIXED)), data.draw(names)
    lost = in_a_row(data.draw(st.lists(st.booleans(), max_size=STEPS)))
    one, other = (
        Run(plan, explorers, STEPS, itertools.cycle(data.draw(speeds)), (), True, iter(lost))
        for _ in range(2)
    )
    one.run()
    other.run()
    assert one.trained == other.trained


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_style_fixed_trains_on_the_same_batches_whatever_the_speeds(data: st.DataObject) -> None:
    plan, explorers = data.draw(plans(SyncStyle.FIXED)), data.draw(names)
    one, other = (Run(plan, explorers, STEPS, itertools.cycle(data.draw(speeds))) for _ in range(2))
    one.run()
    other.run()
    assert one.trained == other.trained
    assert [tuple(batch.explorer for batch in batches) for batches in one.trained] == [
        explorers
    ] * STEPS


@pytest.mark.parametrize("style", SyncStyle)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), times=st.lists(st.floats(0.0, 100.0), max_size=6))
def test_batches_that_are_kept_over_restarts_are_each_trained_on_once_and_none_is_in_vain(
    style: SyncStyle, data: st.DataObject, times: list[float]
) -> None:
    plan = replace(data.draw(plans(style)), keeps_batches=True)
    drawn = itertools.cycle(data.draw(speeds))
    restarts = tuple(Fault(at, "restart") for at in times)
    run = Run(plan, data.draw(names), STEPS, drawn, restarts)
    run.run()
    keys = [batch.key for batches in run.trained for batch in batches]
    assert len(keys) == len(set(keys))
    assert run.refused == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_style_fixed_trains_on_the_same_batches_after_trainers_were_restarted(
    data: st.DataObject,
) -> None:
    plan = TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=TIMEOUT))
    explorers, drawn = data.draw(names), itertools.cycle(data.draw(speeds))
    restart = st.builds(
        Fault, st.floats(0.0, 60.0), st.just("restart"), st.just(""), st.integers(0, 3)
    )
    restarts = tuple(data.draw(st.lists(restart, min_size=1, max_size=4)))
    undisturbed = Run(plan, explorers, STEPS, itertools.cycle([1.0]))
    restarted = Run(plan, explorers, STEPS, drawn, restarts)
    undisturbed.run()
    restarted.run()
    assert restarted.trained == undisturbed.trained


@pytest.mark.parametrize("style", SyncStyle)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), places=st.integers(1, 20), keeps=st.booleans())
def test_each_batch_of_the_data_is_trained_once_whatever_dies(
    style: SyncStyle, data: st.DataObject, places: int, keeps: bool
) -> None:
    """Explorers, trainers, with and without the loss of steps, and the Synchronizer."""
    plan = replace(data.draw(plans(style)), keeps_batches=keeps)
    drawn = itertools.cycle(data.draw(speeds))
    run = Run(plan, data.draw(names), STEPS, drawn, tuple(data.draw(faults)), places=places)
    run.run()
    trained = sorted(batch.place for step in run.trained[: run.step] for batch in step)
    assert trained == list(range(places))


# -- single steps of the books ------------------------------------------------------------------

FIXED = TrainerPlan(SyncPolicy(SyncStyle.FIXED, timeout=50.0))
DRIVEN = TrainerPlan(SyncPolicy(SyncStyle.TRAINER_DRIVEN, timeout=50.0), 2)


def started(plan: TrainerPlan, *explorers: str) -> tuple[PaceScheduler, Roster]:
    """Books of explorers that all serve version 0, which is published."""
    books, roster = PaceScheduler(), Roster(LEASE)
    for name in explorers:
        roster.register(name, name, 0.0).version = 0
        books.join(name, name, roster.explorers)
    books.note_trainer(plan, 0)
    return books, roster


def turn(books: PaceScheduler, roster: Roster, name: str) -> Turn | None:
    return books.turn(name, name, roster.explorers, 0, stopped=False)[1]


def deliver(books: PaceScheduler, roster: Roster, name: str, made: Turn | None) -> bool:
    assert made is not None
    return books.deliver(name, name, made, None, roster.explorers, 0, 0.0)


def test_an_explorer_that_holds_up_a_step_for_the_timeout_is_given_up_and_the_rest_trains() -> None:
    books, roster = started(FIXED, "a", "b")
    assert deliver(books, roster, "a", turn(books, roster, "a"))
    assert books.order(roster.explorers, 0, 100.0).seconds == 50.0
    assert books.order(roster.explorers, 0, 149.0).seconds == 1.0
    assert books.order(roster.explorers, 0, 150.0).give_up == {"b"}
    roster.give_up("b", "late", LossReason.NOT_READY)
    assert [batch.explorer for batch in books.order(roster.explorers, 0, 150.0).batches] == ["a"]


def test_what_others_deliver_does_not_give_more_time_to_one_that_holds_training_up() -> None:
    books, roster = started(FIXED, "a", "b")
    assert books.order(roster.explorers, 0, 100.0).seconds == 50.0
    made = turn(books, roster, "a")
    assert made is not None
    assert books.deliver("a", "a", made, None, roster.explorers, 0, 136.0)
    assert books.order(roster.explorers, 0, 149.0).seconds == 1.0
    assert books.order(roster.explorers, 0, 150.0).give_up == {"b"}


def test_a_trainer_without_explorers_is_told_so_after_the_timeout() -> None:
    books, roster = started(FIXED)
    assert books.order(roster.explorers, 0, 0.0).seconds == 50.0
    with pytest.raises(WeightsTimeoutError, match="no explorer made a batch for step 1 within 50"):
        books.order(roster.explorers, 0, 50.0)


def test_a_share_that_comes_after_its_step_has_begun_is_not_wanted() -> None:
    books, roster = started(FIXED, "a")
    late = turn(books, roster, "a")
    books.begin_step(1, [])
    assert not deliver(books, roster, "a", late)
    assert books.queue == []


def test_a_batch_that_is_delivered_twice_is_queued_once() -> None:
    books, roster = started(FIXED, "a")
    made = turn(books, roster, "a")
    assert deliver(books, roster, "a", made)
    assert deliver(books, roster, "a", made)
    assert len(books.queue) == 1


def test_an_explorer_that_was_replaced_does_not_make_its_share_again() -> None:
    books, roster = started(FIXED, "a")
    assert deliver(books, roster, "a", turn(books, roster, "a"))
    roster.register("a", "another", 0.0).version = 0
    move, made = books.turn("a", "another", roster.explorers, 0, stopped=False)
    assert (move, made) == (ExplorerMove.WAIT, None)


def test_a_turn_that_was_not_delivered_is_taken_back() -> None:
    books, roster = started(DRIVEN, "a")
    assert turn(books, roster, "a") == Turn(0, 1)
    assert turn(books, roster, "a") == Turn(0, 2)
    assert deliver(books, roster, "a", Turn(0, 2))
    assert len(books.queue) == 1


def test_explorers_wait_while_batches_for_two_steps_are_in_store() -> None:
    books, roster = started(DRIVEN, "a")
    for _ in range(4):
        assert deliver(books, roster, "a", turn(books, roster, "a"))
    assert turn(books, roster, "a") is None
    books.begin_step(1, [batch.key for batch in books.queue[:2]])
    assert turn(books, roster, "a") is not None


def test_a_batch_with_a_lost_payload_is_made_again_by_live_explorers() -> None:
    books, roster = started(DRIVEN, "a", "b")
    for name in ("a", "b"):
        assert deliver(books, roster, name, turn(books, roster, name))
    books.discard([("a", 1)])
    assert books.order(roster.explorers, 0, 0.0).batches == ()
    assert deliver(books, roster, "b", turn(books, roster, "b"))
    assert [b.explorer for b in books.order(roster.explorers, 0, 0.0).batches] == ["b", "b"]


@pytest.mark.parametrize("offset", [0, 1])
def test_a_lost_share_of_a_living_explorer_is_made_again_and_trained_on_once(offset: int) -> None:
    books, roster = started(
        TrainerPlan(SyncPolicy(SyncStyle.FIXED, interval=3, offset=offset, timeout=50.0)), "a", "b"
    )
    for name in ("a", "b"):
        assert deliver(books, roster, name, turn(books, roster, name))
    assert len(books.order(roster.explorers, 0, 0.0).batches) == 2
    assert deliver(books, roster, "b", turn(books, roster, "b"))
    under_way = turn(books, roster, "b")
    assert under_way == Turn(0, 3)

    books.discard([("b", 1)])
    order = books.order(roster.explorers, 0, 49.0)
    assert order == TrainerOrder(seconds=50.0), "it has its time anew"
    assert deliver(books, roster, "b", under_way), "what it was making meanwhile counts"
    again = turn(books, roster, "b")
    assert again == Turn(0, 1)
    assert deliver(books, roster, "b", again)

    for step in (1, 2, 3):
        while (next_turn := turn(books, roster, "a")) is not None and next_turn.number <= step:
            assert deliver(books, roster, "a", next_turn)
        batches = books.order(roster.explorers, 0, 60.0).batches
        assert [batch.key for batch in batches] == [("a", step), ("b", step)]
        books.begin_step(step, [batch.key for batch in batches])
        books.trained(step)
    assert books.queue == []


def test_a_share_that_is_lost_twice_is_made_a_third_time() -> None:
    books, roster = started(FIXED, "a")
    for _ in range(3):
        assert books.order(roster.explorers, 0, 0.0).batches == ()
        assert deliver(books, roster, "a", turn(books, roster, "a"))
        books.discard([])
        assert [b.key for b in books.order(roster.explorers, 0, 0.0).batches] == [("a", 1)]
        books.discard([("a", 1)])
    books.discard([("a", 1)])
    assert turn(books, roster, "a") == Turn(0, 1)


def test_a_new_scheduler_knows_the_explorers_of_the_old_one_and_waits_for_them() -> None:
    books, roster = started(FIXED, "a", "b")
    assert deliver(books, roster, "a", turn(books, roster, "a"))
    anew = PaceScheduler()
    anew.note_trainer(FIXED, 0)
    assert deliver(anew, roster, "a", turn(anew, roster, "a")), "what was queued is made again"
    assert anew.order(roster.explorers, 0, 0.0).batches == (), "b is still expected"
    assert deliver(anew, roster, "b", turn(anew, roster, "b"))
    assert len(anew.order(roster.explorers, 0, 0.0).batches) == 2


def test_an_explorer_that_only_takes_weights_is_not_waited_for() -> None:
    books, roster = started(FIXED, "a")
    roster.register("evaluator", "e", 0.0)
    assert deliver(books, roster, "a", turn(books, roster, "a"))
    assert len(books.order(roster.explorers, 0, 0.0).batches) == 1


def test_at_the_end_explorers_take_the_last_version_and_make_nothing() -> None:
    books, roster = started(FIXED, "a")
    books.note_trainer(FIXED, 5, finishing=True)
    assert books.turn("a", "a", roster.explorers, 5, stopped=False)[0] == ExplorerMove.FETCH
    roster.explorers["a"].version = 5
    assert books.turn("a", "a", roster.explorers, 5, stopped=False)[0] == ExplorerMove.WAIT
    assert books.turn("a", "a", roster.explorers, 5, stopped=True)[0] == ExplorerMove.STOP


def test_one_that_came_back_and_lags_is_not_waited_for() -> None:
    books, roster = started(FIXED, "a", "b")
    roster.give_up("b", "silent", LossReason.SILENT)
    assert roster.explorers["b"].status == LOST
    roster.rejoin("b", "b", None, 0.0)
    books.join("b", "b", roster.explorers)
    assert deliver(books, roster, "a", turn(books, roster, "a"))
    assert len(books.order(roster.explorers, 0, 0.0).batches) == 1


def test_a_version_on_its_way_is_not_published_again_and_is_waited_for_in_bounds() -> None:
    books, roster = started(FIXED, "a")
    books.note_trainer(FIXED, 1)
    assert books.order(roster.explorers, 0, 0.0).publish
    books.note_trainer(FIXED, 1, sent=1)
    assert turn(books, roster, "a") is None, "step 2 needs version 1"
    assert books.order(roster.explorers, 0, 10.0) == TrainerOrder(seconds=50.0)
    with pytest.raises(WeightsTimeoutError, match="version 1 was published 50 s ago"):
        books.order(roster.explorers, 0, 60.0)
    assert roster.explorers["a"].status != LOST


def test_a_version_that_is_aborted_on_its_way_is_done_without() -> None:
    aborted: dict[int, str] = {}
    books, roster = started(FIXED, "a")
    books.aborted = aborted
    books.note_trainer(FIXED, 1, sent=1)
    assert books.in_flight(0) == [1]
    assert turn(books, roster, "a") is None, "step 2 needs version 1"
    aborted[1] = "no space left"
    assert books.in_flight(0) == []
    assert deliver(books, roster, "a", turn(books, roster, "a"))
    order = books.order(roster.explorers, 0, 1.0)
    assert [batch.version for batch in order.batches] == [0]


def test_what_was_aborted_counts_when_what_was_sent_before_has_ended() -> None:
    plan = TrainerPlan(SyncPolicy(SyncStyle.FULLY_ASYNC, max_staleness=1, timeout=50.0))
    books, roster = started(plan, "a")
    books.aborted = {2: "no space left"}
    books.note_trainer(plan, 1, sent=1)
    books.note_trainer(plan, 2, sent=2)
    assert turn(books, roster, "a") is None, "version 1 may still come"
    books.aborted = {1: "no space left", 2: "no space left"}
    assert turn(books, roster, "a") == Turn(0, 3)


def test_without_a_first_version_the_trainer_is_told_so_at_once() -> None:
    books, roster = started(FIXED, "a")
    books.aborted = {0: "no space left"}
    books.note_trainer(FIXED, 0, sent=0)
    with pytest.raises(WeightsUnavailableError, match=r"version 0 was aborted.*no space left"):
        books.order(roster.explorers, None, 0.0)


@pytest.mark.parametrize("style", SyncStyle)
def test_after_three_versions_that_failed_in_a_row_training_ends_and_says_why(
    style: SyncStyle,
) -> None:
    bound = 0 if style is SyncStyle.FULLY_ASYNC else None
    plan = TrainerPlan(SyncPolicy(style, max_staleness=bound, timeout=TIMEOUT))
    lost = itertools.repeat(True)
    run = Run(plan, ("a",), STEPS, itertools.repeat(1.0), (), True, lost)
    with pytest.raises(WeightsUnavailableError, match=r"4 versions in a row were aborted.*a test"):
        run.run()
    assert run.versions == [0]
    assert len(run.aborted) == 4


def test_versions_that_were_skipped_do_not_end_training() -> None:
    books, roster = started(FIXED, "a")
    books.aborted = dict.fromkeys(range(1, 9), f"{SKIPPED}: 2 saves were staged")
    books.note_trainer(FIXED, 8, sent=8)
    assert books.order(roster.explorers, 0, 0.0) == TrainerOrder(seconds=50.0)
