"""Weights are cut into buckets of a size."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainsync.engines.inference.base import in_buckets


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_buckets_hold_everything_in_order_and_no_more_than_their_size(
    sizes: list[int], size: int
) -> None:
    named = [(str(n), torch.zeros(count, dtype=torch.uint8)) for n, count in enumerate(sizes)]
    buckets = list(in_buckets(named, size))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in named]
    for bucket in buckets:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= size
    for one, following in itertools.pairwise(buckets):
        assert sum(tensor.nbytes for _, tensor in [*one, following[0]]) > size


def test_a_bucket_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0 bytes, got 0"):
        list(in_buckets([], 0))
