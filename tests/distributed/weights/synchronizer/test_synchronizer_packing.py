"""Every rank packs its own part; together they make the full tensors, whatever the placement."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from trainsync.weights.buckets.schema import Schema, check_cover
from trainsync.weights.errors import InconsistentUploadError, UnsupportedWeightsError
from trainsync.weights.transports.object_store.assemble import Assembled, Part
from trainsync.weights.transports.object_store.packing import Packing

from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

PLACEMENTS: dict[str, list[Placement]] = {
    "hsdp": [Replicate(), Shard(0)],
    "fsdp and tp by rows": [Shard(0), Shard(0)],
    "fsdp and tp by columns": [Shard(0), Shard(1)],
    "columns, replicated": [Shard(1), Replicate()],
    "replicated": [Replicate(), Replicate()],
}
SHAPES = [(8, 8), (7, 5), (1, 3), (3, 1), (0, 4)]  # even, uneven, with ranks that get nothing


def full(name: str) -> torch.Tensor:
    shape = next(shape for shape in SHAPES if name.endswith(str(shape)))
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def names() -> list[str]:
    return [f"{placement} {shape}" for placement in PLACEMENTS for shape in SHAPES]


def pack() -> tuple[list[list[bytes]], bytes]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, torch.Tensor] = {
        name: distribute_tensor(full(name), mesh, PLACEMENTS[name.rsplit(" (", 1)[0]])
        for name in names()
    }
    state["not sharded"] = torch.arange(3)
    packing = Packing(state, dist.get_rank(), limit=100)
    buckets = [[array.tobytes() for array in bucket.arrays] for bucket in packing.buckets()]
    return buckets, packing.schema.encode()


@pytest.fixture(scope="module")
def parts() -> list[Part]:
    packed = values_of(run_ranks(pack, world_size=4))
    return [
        (
            Schema.decode(schema),
            {i: [np.frombuffer(data, np.uint8) for data in row] for i, row in enumerate(buckets)},
        )
        for buckets, schema in packed
    ]


def test_all_parts_make_every_tensor_bit_for_bit(
    parts: list[Part],
) -> None:
    tensors = Assembled(parts, [piece.name for schema, _ in parts for piece in schema.pieces])
    assert set(tensors) == {*names(), "not sharded"}
    for name in names():
        assert torch.equal(tensors[name], full(name)), name
    assert torch.equal(tensors["not sharded"], torch.arange(3))


def test_nothing_is_sent_twice(parts: list[tuple[np.ndarray, Schema]]) -> None:
    sent = sum(piece.size for schema, _ in parts for piece in schema.pieces)
    assert sent == sum(full(name).numel() * 2 for name in names()) + 3 * 8


def test_without_one_part_the_others_are_refused(
    parts: list[Part],
) -> None:
    for missing in range(4):
        with pytest.raises(InconsistentUploadError, match=r"cover \d+ of \d+"):
            check_cover(schema for rank, (schema, _) in enumerate(parts) if rank != missing)


def pack_partial() -> str:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.ones(2), mesh, [Partial()])}
    with pytest.raises(UnsupportedWeightsError) as raised:
        Packing(state, dist.get_rank())
    return str(raised.value)


def test_a_tensor_that_waits_for_a_reduction_is_refused() -> None:
    assert all("w waits for a reduction" in text for text in values_of(run_ranks(pack_partial)))
