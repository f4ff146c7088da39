"""A data cursor: each item is trained once, also when a death undoes what was done since a save."""

import contextlib
import json
import logging
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.data.cursor import DataCursor, Item
from trainsync.data.errors import DataExhaustedError, DataMismatchError, NotInFlightError


def test_every_item_of_every_epoch_is_dealt_out_once() -> None:
    cursor = DataCursor(5, epochs=3)
    taken = []
    while not cursor.finished:
        items = cursor.take(4)
        cursor.trained(items)
        taken += items
    assert Counter(taken) == Counter(Item(e, i) for e in range(3) for i in range(5))


def test_epochs_have_orders_of_their_own_that_the_seed_determines() -> None:
    first, again, other = (DataCursor(50, epochs=2, seed=seed).take(100) for seed in (1, 1, 2))
    assert first == again != other
    assert [item.index for item in first[:50]] != [item.index for item in first[50:]]
    assert [item.index for item in DataCursor(3, shuffle=False).take(3)] == [0, 1, 2]


def test_the_end_of_the_data_is_told_and_raises(caplog: pytest.LogCaptureFixture) -> None:
    cursor = DataCursor(3)
    with caplog.at_level(logging.WARNING):
        items = cursor.take(5)
    assert len(items) == 3
    assert "3 items were left of 5" in caplog.text
    assert not cursor.finished, "they are in flight"
    with pytest.raises(DataExhaustedError, match="3 in flight"):
        cursor.take(1)
    cursor.trained(items)
    assert cursor.finished


def test_what_was_in_flight_is_dealt_out_first_after_a_restart() -> None:
    cursor = DataCursor(10, shuffle=False)
    a, b, c = cursor.take(2), cursor.take(2), cursor.take(2)
    cursor.trained(b)
    restarted = DataCursor(10, shuffle=False)
    restarted.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert restarted.in_flight == ()
    assert restarted.take(5) == [*a, *c, Item(0, 6)]


def test_what_is_given_back_is_dealt_out_again_and_what_is_dropped_is_not() -> None:
    cursor = DataCursor(4, shuffle=False)
    items = cursor.take(3)
    cursor.give_back(items[:1])
    cursor.drop(items[1:2], "all answers alike")
    assert cursor.in_flight == (items[2],)
    assert cursor.take(2) == [items[0], Item(0, 3)]
    assert cursor.metrics() == {
        "data_epoch": 1.0,
        "data_trained": 0.0,
        "data_dropped": 1.0,
        "data_in_flight": 3.0,
    }


@pytest.mark.parametrize("how", ["never taken", "twice", "twice in one call"])
def test_an_item_cannot_be_trained_twice_or_untaken(how: str) -> None:
    cursor = DataCursor(4, shuffle=False)
    items = cursor.take(2)
    wrong = {
        "never taken": [items[0], Item(0, 3)],
        "twice": items,
        "twice in one call": [items[1], items[1]],
    }[how]
    if how == "twice":
        cursor.trained(items[:1])
    before = cursor.in_flight
    with pytest.raises(NotInFlightError):
        cursor.trained(wrong)
    assert cursor.in_flight == before, "nothing of the call counts"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (DataCursor(11), "length 10, this one 11"),
        (DataCursor(10, shuffle=False), "shuffle True, this one False"),
        (DataCursor(10, seed=3), "seed 0, this one 3"),
    ],
)
def test_a_changed_dataset_is_refused_with_what_changed(other: DataCursor, said: str) -> None:
    with pytest.raises(DataMismatchError, match=said):
        other.load_state_dict(DataCursor(10).state_dict())


def test_more_epochs_may_be_asked_for_than_when_the_state_was_saved() -> None:
    cursor = DataCursor(2)
    cursor.trained(cursor.take(2))
    longer = DataCursor(2, epochs=2)
    longer.load_state_dict(cursor.state_dict())
    assert {item.epoch for item in longer.take(2)} == {1}


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"position": 10}, {"position": -1}, {"trained": "3"}, {"epoch": None}, "drop"],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: dict[str, object] | str) -> None:
    cursor = DataCursor(10)
    state = cursor.state_dict()
    if isinstance(change, str):
        del state["in_flight"]
    else:
        state.update(change)
    with pytest.raises(DataMismatchError):
        cursor.load_state_dict(state)
    assert cursor.state_dict() == DataCursor(10).state_dict()


@pytest.mark.parametrize("arguments", [{"length": 0}, {"length": 3, "epochs": 0}])
def test_an_empty_dataset_or_no_epoch_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        DataCursor(**arguments)
    with pytest.raises(ValueError, match="count must be"):
        DataCursor(3).take(0)


@settings(max_examples=200)
@given(
    length=st.integers(1, 30),
    epochs=st.integers(1, 3),
    moves=st.lists(st.sampled_from(["take", "train", "back", "save", "die"]), max_size=60),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_the_surviving_history_has_each_item_once_whenever_the_trainer_dies(
    length: int, epochs: int, moves: list[str], seed: int, data: st.DataObject
) -> None:
    """A death takes the history back to the last save; then training goes on to the end."""
    cursor = DataCursor(length, epochs=epochs, seed=seed)
    history: list[Item] = []
    saved = (json.dumps(cursor.state_dict()), 0)

    def some_in_flight() -> list[Item]:
        items = cursor.in_flight
        return data.draw(st.permutations(items))[: data.draw(st.integers(0, len(items)))]

    for move in moves:
        if move == "take":
            with contextlib.suppress(DataExhaustedError):
                cursor.take(data.draw(st.integers(1, 7)))
        elif move == "train":
            items = some_in_flight()
            cursor.trained(items)
            history += items
        elif move == "back":
            cursor.give_back(some_in_flight())
        elif move == "save":
            saved = (json.dumps(cursor.state_dict()), len(history))
        else:
            cursor = DataCursor(length, epochs=epochs, seed=seed)
            cursor.load_state_dict(json.loads(saved[0]))
            del history[saved[1] :]
    cursor.give_back(cursor.in_flight)
    while not cursor.finished:
        items = cursor.take(5)
        cursor.trained(items)
        history += items
    assert Counter(history) == Counter(Item(e, i) for e in range(epochs) for i in range(length))


def test_over_10000_deaths_no_item_is_skipped_and_none_is_trained_twice() -> None:
    draws, length, epochs, deaths = random.Random(7), 1000, 100, 0
    cursor = DataCursor(length, epochs=epochs)
    history: list[Item] = []
    saved, kept = cursor.state_dict(), 0
    while not cursor.finished:
        if deaths < 10_000 and draws.random() < 0.6:
            deaths += 1
            cursor = DataCursor(length, epochs=epochs)
            cursor.load_state_dict(saved)
            del history[kept:]
        with contextlib.suppress(DataExhaustedError):
            cursor.take(draws.randint(1, 16))
        done = [item for item in cursor.in_flight if draws.random() < 0.7]
        cursor.trained(done)
        history += done
        if draws.random() < 0.6:
            saved, kept = cursor.state_dict(), len(history)
    assert deaths == 10_000
    assert Counter(history) == Counter(Item(e, i) for e in range(epochs) for i in range(length))
