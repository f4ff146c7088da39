"""Full tensors that come one by one are shared out among the ranks, and nothing is held longer."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from trainsync.weights.buckets.schema import Schema
from trainsync.weights.errors import UnsupportedWeightsError
from trainsync.weights.transports.object_store.assemble import Assembled, Part
from trainsync.weights.transports.object_store.packing import StreamPacking

STATE = {f"w{n}": torch.randn(n + 1, 3).to(torch.bfloat16) for n in range(9)} | {
    "scalar": torch.tensor(3, dtype=torch.int64),
    "transposed": torch.randn(4, 6).t(),
    "empty": torch.empty(0, 5),
}


def part(rank: int, world_size: int, limit: int) -> tuple[Part, int]:
    """The rank's tensors, and their bytes."""
    packing = StreamPacking(STATE.items(), rank, world_size, limit)
    buckets = {n: [a.copy() for a in b.arrays] for n, b in enumerate(packing.buckets())}
    size = sum(array.nbytes for arrays in buckets.values() for array in arrays)
    return (Schema.decode(packing.schema.encode()), buckets), size


@pytest.mark.parametrize("limit", [1, 40, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_shares_of_all_ranks_are_the_whole_and_nearly_equal(
    world_size: int, limit: int
) -> None:
    parts = [part(rank, world_size, limit) for rank in range(world_size)]
    whole = Assembled([shared for shared, _ in parts], list(STATE))
    for name, tensor in STATE.items():
        assert torch.equal(whole[name], tensor), name
    sizes = [size for _, size in parts]
    assert sum(sizes) == sum(tensor.nbytes for tensor in STATE.values())
    assert max(sizes) - min(sizes) <= max(tensor.nbytes for tensor in STATE.values())


def test_a_rank_holds_no_tensor_that_is_not_its_own() -> None:
    gone: list[weakref.ref[torch.Tensor]] = []

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(8):
            gc.collect()
            assert sum(ref() is not None for ref in gone) <= 2, "the whole model is held"
            tensor = torch.full((4,), float(number))
            gone.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor

    packing = StreamPacking(given(), 1, 2, limit=1)
    assert [bucket.bytes for bucket in packing.buckets()] == [16] * 4


def test_what_is_no_full_tensor_is_refused_by_name() -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedWeightsError, match="odd is not a dense tensor with data"):
        list(StreamPacking([("odd", sparse)], 0, 1).buckets())
