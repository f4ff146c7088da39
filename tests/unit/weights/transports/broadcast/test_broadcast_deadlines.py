"""Deadlines of a broadcast, and its bucket size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines

from tests.unit.weights.transports.broadcast.pair import Pair


def test_waiting_for_a_version_that_does_not_come_ends_and_says_why(pair: Pair) -> None:
    pair.send(1)
    with pytest.raises(WeightsUnavailableError, match=r"no version after 1 came to e within 0.1 s"):
        pair.explorer.wait_newer(1, 0.1)
    pair.trainer.close()
    with pytest.raises(WeightsUnavailableError, match="trainer of attempt 0"):
        pair.explorer.wait_newer(1, 1.0)
    with pair.explorer.reading() as served:
        assert served is not None
        assert served.version == 1


def test_a_bucket_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket size must be a positive multiple of 64"):
        WeightBroadcaster(0, "127.0.0.1", bucket_size=100)


@pytest.mark.parametrize("name", ["whole", "bucket", "connect", "silence"])
def test_a_deadline_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Deadlines(**{name: 0.0})


def test_the_whole_is_not_shorter_than_a_bucket() -> None:
    with pytest.raises(ValueError, match="must not be less than bucket"):
        Deadlines(whole=1.0, bucket=2.0)


def test_a_large_bucket_has_the_time_that_it_takes_as_far_as_the_whole_allows() -> None:
    assert Deadlines.of(600.0, 16 << 20).bucket == 30.0
    assert Deadlines.of(600.0, 2_500_000_000).bucket == 100.0
    assert Deadlines.of(60.0, 2_500_000_000).bucket == 15.0
    assert Deadlines.of(20.0, 64).bucket == 5.0


@given(st.floats(0.5, 86400), st.integers(1 << 20, 4 << 30))
def test_two_losses_of_an_explorer_leave_time_for_the_others(seconds: float, size: int) -> None:
    made = Deadlines.of(seconds, size)
    answer = made.bucket + made.connect
    assert made.bucket + answer < 0.7 * made.whole
