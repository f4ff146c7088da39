"""Which explorer reads an object, and what is kept for the others."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.transports.anchors.pool.offers import (
    KEEP_SECONDS,
    READ_SECONDS,
    Offers,
    ReadAction,
)

MOST = 100


def two_explorers() -> Offers:
    """Both have asked before."""
    offers = Offers()
    for explorer in ("one", "two"):
        offers.take("before", explorer, 0.0)
    return offers


def test_one_explorer_reads_and_the_others_get_the_object_from_it() -> None:
    offers = two_explorers()
    assert offers.take("a", "one", 0.0) == (ReadAction.READ_FOR_ALL, None)
    assert offers.take("a", "two", 1.0) == (ReadAction.WAIT, None)
    offers.give("a", "there", 10, MOST, 2.0)
    assert offers.take("a", "two", 3.0) == (ReadAction.GET, "there")
    assert offers.take("b", "two", 3.0) == (ReadAction.READ_FOR_ALL, None)


def test_a_reader_that_is_silent_is_followed_by_the_next_and_one_that_is_heard_is_not() -> None:
    offers = two_explorers()
    offers.take("a", "one", 0.0)
    offers.heard("a", "one", 4.0)
    assert offers.take("a", "two", READ_SECONDS + 1.0)[0] is ReadAction.WAIT
    offers.heard("a", "three", READ_SECONDS + 1.0)
    assert offers.take("a", "two", 4.0 + READ_SECONDS)[0] is ReadAction.READ_FOR_ALL
    offers.give_up("a", "one")
    assert offers.take("a", "three", 4.0 + READ_SECONDS)[0] is ReadAction.WAIT


def test_a_reader_that_gives_up_is_followed_at_once() -> None:
    offers = two_explorers()
    offers.take("a", "one", 0.0)
    offers.give_up("a", "one")
    assert offers.take("a", "two", 0.1)[0] is ReadAction.READ_FOR_ALL


def test_a_reader_that_begins_again_need_not_wait_for_itself() -> None:
    offers = two_explorers()
    offers.take("a", "one", 0.0)
    assert offers.take("a", "one", 0.1)[0] is ReadAction.READ_FOR_ALL


def test_an_object_that_could_not_be_had_is_read_again() -> None:
    offers = two_explorers()
    offers.give("a", "gone", 10, MOST, 0.0)
    offers.forget("a")
    assert offers.take("a", "two", 1.0)[0] is ReadAction.READ_FOR_ALL


def test_an_explorer_that_is_alone_reads_for_itself_and_the_next_one_does_not_wait_for_it() -> None:
    offers = Offers()
    assert offers.take("a", "one", 0.0) == (ReadAction.READ, None)
    assert offers.take("a", "two", 2.0) == (ReadAction.READ_FOR_ALL, None)
    assert offers.take("a", "one", 2.0) == (ReadAction.WAIT, None)
    assert offers.take("b", "one", 4.0 + KEEP_SECONDS)[0] is ReadAction.READ, "the other is gone"


def test_what_no_explorer_asks_for_is_let_go() -> None:
    offers = Offers()
    offers.give("a", "old", 10, MOST, 0.0)
    offers.give("b", "new", 10, MOST, 5.0)
    assert offers.expire(KEEP_SECONDS + 1.0)
    assert offers.handle("a") is None
    assert offers.handle("b") == "new"
    assert not offers.expire(KEEP_SECONDS + 6.0)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, MOST)), max_size=30))
def test_what_is_kept_fits_and_the_newest_is_among_it(given_objects: list[tuple[int, int]]) -> None:
    offers, sizes = Offers(), dict[str, int]()
    for now, (number, size) in enumerate(given_objects):
        key = f"object-{number}"
        sizes[key] = size
        offers.give(key, key, size, MOST, float(now))
        there = [one for one in sizes if offers.handle(one) is not None]
        assert sum(sizes[one] for one in there) <= MOST
        assert key in there


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "give", "give_up"]), st.sampled_from("xyz")),
        max_size=40,
    )
)
def test_while_a_reader_is_heard_no_other_explorer_reads(calls: list[tuple[str, str]]) -> None:
    offers, reading = two_explorers(), Counter[str]()
    for now, (call, explorer) in enumerate(calls):
        at = now / 100
        if call == "take":
            action, _ = offers.take("a", explorer, at)
            if action is ReadAction.READ_FOR_ALL:
                assert not reading.keys() - {explorer}
                reading[explorer] += 1
        elif explorer in reading:
            del reading[explorer]
            if call == "give":
                offers.give("a", "there", 1, MOST, at)
            else:
                offers.give_up("a", explorer)
