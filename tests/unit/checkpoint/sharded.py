"""Sharded states of any mesh in one process, and files of them, without a process group."""

from itertools import product
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from trainsync.checkpoint.load.reshard.plan import Layout, Split
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.shard_names import shard_file_name


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Meshes of up to three dimensions; ranks in any order."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = 1
    for size in mesh:
        count *= size
    ranks = tuple(draw(st.permutations(range(count))))
    split = st.builds(Split, st.integers(0, len(shape) - 1), st.integers(1, 3))
    splits = tuple(draw(st.none() | split) for _ in mesh)
    return Layout(shape, mesh, ranks, splits)


shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


def arange(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """1, 2, 3, … in that shape."""
    count = 1
    for length in shape:
        count *= length
    return torch.arange(1, count + 1).reshape(shape).to(dtype)


def placements(layout: Layout) -> tuple[Placement, ...]:
    """The layout's placements as torch objects."""
    return tuple(
        Replicate()
        if split is None
        else Shard(split.dim)
        if split.groups == 1
        else _StridedShard(split.dim, split_factor=split.groups)
        for split in layout.splits
    )


def shards(full: torch.Tensor, layout: Layout) -> dict[int, torch.Tensor]:
    """Every rank's shard, cut by torch's own placements."""
    cut = {}
    for coordinate in product(*(range(size) for size in layout.mesh)):
        local = full
        for size, placement, position in zip(
            layout.mesh, placements(layout), coordinate, strict=True
        ):
            if isinstance(placement, Shard | _StridedShard):
                local = placement._split_tensor(local, size, with_padding=False)[0][position]
        cut[layout.rank(coordinate)] = local.clone()
    return cut


def dtensor(local: torch.Tensor, layout: Layout, rank: int) -> DTensor:
    """``local`` as the part of ``rank`` of a tensor with this layout."""
    mesh = DeviceMesh(
        "cpu", torch.tensor(layout.ranks).reshape(layout.mesh), _init_backend=False, _rank=rank
    )
    stride = torch.empty(layout.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(layout.shape), stride, local.dtype)
    return DTensor(
        local, DTensorSpec(mesh, placements(layout), tensor_meta=meta), requires_grad=False
    )


def sharded(full: torch.Tensor, layout: Layout) -> dict[int, torch.Tensor]:
    """Every rank's DTensor."""
    return {rank: dtensor(local, layout, rank) for rank, local in shards(full, layout).items()}


def save(directory: Path, name: str, states: dict[int, object], world_size: int) -> Component:
    """One file a rank, as ``save_async`` writes them."""
    folder = directory / "actor"
    folder.mkdir(parents=True, exist_ok=True)
    for rank, state in states.items():
        torch.save(state, folder / shard_file_name(name, rank, world_size))
    return Component(name, "actor", world_size, frozenset(states))
