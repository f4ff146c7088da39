"""A cursor of batches: any process knows the items of a place, and each place is trained once."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.data.cursor import DataCursor, Item
from trainsync.data.errors import DataMismatchError, NotInFlightError
from trainsync.data.places import BatchCursor, BatchOrder, TrainedPlaces


@given(
    length=st.integers(1, 20),
    batch_size=st.integers(1, 30),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_the_places_have_every_item_of_every_epoch_once_in_the_order_of_a_data_cursor(
    length: int, batch_size: int, epochs: int, *, shuffle: bool
) -> None:
    order = BatchOrder(length, batch_size, epochs, shuffle, seed=3)
    assert order.places is not None
    batches = [order.items(place) for place in range(order.places)]
    items = [item for batch in batches for item in batch]
    assert Counter(items) == Counter(Item(e, i) for e in range(epochs) for i in range(length))
    cursor = DataCursor(length, epochs=epochs, shuffle=shuffle, seed=3)
    assert cursor.take(length * epochs) == items
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    for place in (-1, order.places):
        with pytest.raises(ValueError, match="no place"):
            order.items(place)


def test_a_dataset_without_end_has_places_without_end() -> None:
    order = BatchOrder(3, 2, epochs=None, shuffle=False)
    assert order.places is None
    assert order.items(100) == [Item(66, 2), Item(67, 0)]
    cursor = BatchCursor(order)
    cursor.trained(range(50))
    assert not cursor.finished


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_orders_without_a_batch_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        BatchOrder(*wrong)


@given(st.lists(st.sets(st.integers(0, 30), max_size=5)), st.sets(st.integers(0, 30)))
def test_trained_places_are_a_set_of_numbers(told: list[set[int]], held: set[int]) -> None:
    trained, expected = TrainedPlaces(most=31), set[int]()
    for places in told:
        trained, expected = trained.also(places), expected | places
    assert {place for place in range(40) if place in trained} == expected
    assert len(trained) == len(expected)
    assert trained.below not in trained
    left = sorted(set(range(31)) - expected - held)
    assert trained.first_left(held) == (left[0] if left else None)


@given(st.permutations(range(9)), st.integers(0, 9))
def test_a_saved_cursor_goes_on_whatever_order_the_batches_were_trained_in(
    places: list[int], saved: int
) -> None:
    order = BatchOrder(17, 2)
    cursor = BatchCursor(order)
    for place in places[:saved]:
        cursor.trained([place])
    state = json.loads(json.dumps(cursor.state_dict()))
    cursor.trained(places[saved:])
    assert cursor.finished
    restarted = BatchCursor(order)
    restarted.load_state_dict(state)
    assert {place for place in places if place in restarted.done} == set(places[:saved])
    assert restarted.finished == (saved == 9)
    restarted.trained(places[saved:])
    assert restarted.finished


@pytest.mark.parametrize("wrong", [[0, 1], [2, 2], [9]], ids=["before", "twice", "none"])
def test_a_batch_cannot_be_trained_twice_and_then_nothing_counts(wrong: list[int]) -> None:
    cursor = BatchCursor(BatchOrder(9, 1))
    cursor.trained([1])
    before = cursor.done
    with pytest.raises(NotInFlightError, match="cannot be trained"):
        cursor.trained(wrong)
    assert cursor.done == before


def test_another_dataset_or_another_kind_of_cursor_is_told() -> None:
    saved = BatchCursor(BatchOrder(9, 2)).state_dict()
    with pytest.raises(DataMismatchError, match="batch_size 2, this one 3"):
        BatchCursor(BatchOrder(9, 3)).load_state_dict(saved)
    with pytest.raises(DataMismatchError, match="no state of a cursor of batches"):
        BatchCursor(BatchOrder(9, 2)).load_state_dict(DataCursor(9).state_dict())
    with pytest.raises(DataMismatchError, match="no state of a data cursor"):
        DataCursor(9).load_state_dict(saved)
