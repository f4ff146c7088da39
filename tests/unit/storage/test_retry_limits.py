"""Waits between tries: longer and longer, drawn by chance, and never past a bound."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.storage.retry_limits import RetryLimits

AWAY = Exception("it is away")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def limits(clock: Clock, draw: Callable[[], float] = lambda: 1.0, **given: object) -> RetryLimits:
    return RetryLimits(sleep=clock.sleep, clock=clock, random=draw, **given)  # type: ignore[arg-type]


def waits(made: RetryLimits, clock: Clock) -> list[float]:
    """How long each wait took, until no further try was left."""
    found, tries = [], made.begin()
    before = clock.now
    while tries.again(AWAY):
        found.append(clock.now - before)
        before = clock.now
    assert clock.now == before, "it gave up at once"
    return found


def test_waits_double_up_to_the_longest() -> None:
    clock = Clock()
    made = limits(clock, tries=6, first_wait_seconds=1.0, longest_wait_seconds=10.0)
    assert waits(made, clock) == [1, 2, 4, 8, 10, 10]
    assert waits(made, clock)[0] == 1, "the next piece of work begins with the shortest"


@given(st.floats(1, 3600), st.integers(0, 2**32))
def test_waits_are_drawn_between_half_and_all_and_end_before_the_bound(
    seconds: float, seed: int
) -> None:
    clock = Clock()
    made = limits(clock, random.Random(seed).random, until=seconds)
    found = waits(made, clock)
    assert clock.now <= seconds
    for number, waited in enumerate(found):
        longest = min(0.5 * 2**number, 30.0)
        assert longest / 2 - 1e-6 <= waited <= longest + 1e-6
    assert clock.now >= seconds - 30.0, "the time is used"


def test_nobody_waits_on_when_the_work_is_not_wanted_any_more() -> None:
    clock = Clock()
    made = limits(clock, until=1000.0, first_wait_seconds=20.0, stopped=lambda: clock.now >= 3)
    tries = made.begin()
    assert not tries.again(AWAY)
    assert 3 <= clock.now < 4
    assert not tries.again(AWAY)
    assert clock.now < 4


def test_it_tells_how_long_it_waited_while_it_waits() -> None:
    clock, told = Clock(), list[float]()
    made = limits(clock, tries=2, first_wait_seconds=1.0, on_wait=told.append)
    tries = made.begin()
    assert tries.again(AWAY)
    clock.now += 5  # the try itself
    assert tries.again(AWAY)
    assert sum(told) == pytest.approx(1 + 5 + 2)
    assert len(told) > 2


def test_a_wait_without_any_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a bound"):
        RetryLimits()
