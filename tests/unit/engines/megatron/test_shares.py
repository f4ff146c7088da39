"""Data parallel ranks divide what all of them hold, and come to the same division."""

import pytest

pytest.importorskip("torch")

from trainsync.engines.megatron.state import shares


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_part_has_one_owner_and_all_have_nearly_as_much(ranks: int) -> None:
    sizes = [100, 1, 7, 100, 50, 50, 3, 0, 99]
    owners = shares(sizes, ranks)
    assert len(owners) == len(sizes)
    load = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    assert sum(load) == sum(sizes)
    assert max(load) - min(load) <= max(sizes)


def test_the_same_sizes_are_divided_alike() -> None:
    sizes = [5] * 10
    assert shares(sizes, 4) == shares(list(sizes), 4)
    assert sorted(shares(sizes, 4).count(rank) for rank in range(4)) == [2, 2, 3, 3]
