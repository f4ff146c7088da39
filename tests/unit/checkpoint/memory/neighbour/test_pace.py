"""Copies leave the network to training, and are done before the next save all the same."""

from trainsync.checkpoint.memory.neighbour.pace import LEAST_BYTES_PER_SECOND, Pace

SIZE = 4 * LEAST_BYTES_PER_SECOND


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1


def copy(pace: Pace, clock: Clock, size: int) -> float:
    began = clock.now
    for _ in range(size >> 20):
        pace.sent(1 << 20)
    return clock.now - began


def test_a_first_copy_takes_the_least_of_the_network() -> None:
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    pace.kept("model.0", SIZE)
    assert 3.9 <= copy(pace, clock, SIZE) <= 4.1


def test_copies_take_half_of_the_time_between_two_saves_where_that_is_short() -> None:
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    for _ in range(2):
        for part in ("model.0", "optim.0"):
            pace.kept(part, SIZE)
        clock.sleep(2.0)
    assert 0.9 <= copy(pace, clock, 2 * SIZE) <= 1.1
    clock.sleep(3600)
    pace.kept("model.0", SIZE)
    assert pace.bytes_per_second == LEAST_BYTES_PER_SECOND


def test_time_in_which_nothing_was_sent_is_not_made_up_for() -> None:
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    pace.sent(1 << 20)
    clock.sleep(60)
    # What goes in 0.02 s may go before its time.
    assert copy(pace, clock, LEAST_BYTES_PER_SECOND) >= 0.98


def test_a_copy_wakes_its_threads_some_fifty_times_a_second_and_not_for_every_piece() -> None:
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    pace.kept("model.0", SIZE)
    seconds = copy(pace, clock, SIZE)
    assert clock.sleeps / seconds <= 50
    assert 3.9 <= seconds <= 4.1
