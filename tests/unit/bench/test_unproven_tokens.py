"""What `bench_unproven_tokens` counts."""

from tests.bench.weights import bench_unproven_tokens
from tests.bench.weights.bench_unproven_tokens import Tokens, count
from tests.unit.faults.test_serving_promises import ONE, START, TWO, answered


def test_tokens_of_ready_servers_are_counted_by_the_weights_that_made_them() -> None:
    records = [
        answered(ONE, ONE, ONE),
        answered(TWO, said=ONE),  # not of the version that it says
        answered(TWO, ONE, said=TWO, before=TWO, after=TWO),  # the second one is not
        answered(START, before=START, after=START),  # says no version
        answered(ONE, TWO, after=TWO),  # met by an update
        answered(ONE, after=None),
    ]
    assert count(records) == Tokens(unproven=2, all=6)


def test_a_half_of_the_updates_is_wrong() -> None:
    wrong = bench_unproven_tokens.wrong_updates()
    assert len(wrong) == bench_unproven_tokens.UPDATES // 2
    assert min(wrong) >= 2
