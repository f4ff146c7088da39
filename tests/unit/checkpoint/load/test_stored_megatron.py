"""Boxes of global tensors out of a store: those that any layout saved, each let go of when read.

Names of a model, and faults of a real server: `tests/store/weights/test_megatron_dicts.py`.
"""

import weakref
from pathlib import Path

import pytest
import torch
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.load.stored_megatron import fetch_whole
from trainsync.checkpoint.load.stored_shards import StoredShards
from trainsync.checkpoint.megatron_shards import Box, MegatronShards, pack
from trainsync.checkpoint.shard_names import shard_file_name

from tests.unit.checkpoint.in_store import InStore

LAYERS, ROWS, COLUMNS = 3, 64, 16
WHOLE = torch.arange(LAYERS * ROWS * COLUMNS, dtype=torch.float32).reshape(LAYERS, ROWS, COLUMNS)
NORM = torch.arange(7.0)


def box(layer: int, start: int, stop: int) -> Box:
    held = WHOLE[layer, start:stop].clone()
    return Box("w", (LAYERS, ROWS, COLUMNS), (layer, start, 0), 1, False, held)


def put(
    ranks: list[list[Box]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[MegatronShards, StoredShards]:
    files = {}
    for rank, boxes in enumerate(ranks):
        path = f"actor/{shard_file_name('model', rank, len(ranks))}"
        torch.save(pack(boxes, {"tp": len(ranks)}), folder / str(rank))
        files[path] = (folder / str(rank)).read_bytes()
    there = InStore(monkeypatch, files, 1024)
    assert there.resume.store is not None
    component = Component("model", "actor", len(ranks), frozenset(range(len(ranks))))
    files = StoredShards(there.resume, there.resume.store)
    return MegatronShards(files.open, component), files


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_any_layout_saved_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    part = ROWS // size
    ranks = [
        [box(layer, rank * part, (rank + 1) * part) for layer in range(LAYERS)]
        for rank in range(size)
    ]
    ranks[-1].append(Box("norm", (7,), (0,), 0, False, NORM))
    shards, files = put(ranks, tmp_path, monkeypatch)
    assert shards.tensors["w"].boxes[0][1].data.is_meta, "nothing is read before `fetch_whole`"
    fetch_whole(shards, files)
    assert torch.equal(shards.whole("norm", ()), NORM)
    for layer in range(LAYERS):
        assert torch.equal(shards.whole("w", (layer,)), WHOLE[layer])


def test_memory_of_what_was_read_is_given_back_and_what_is_held_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [[box(layer, 0, ROWS) for layer in range(LAYERS)]]
    shards, files = put(ranks, tmp_path, monkeypatch)
    fetch_whole(shards, files)
    kept, dropped = shards.whole("w", (0,)), weakref.ref(shards.whole("w", (1,)))
    for layer in (0, 1):
        shards.forget_pages("w", (layer,))
    assert dropped() is None
    assert torch.equal(kept, WHOLE[0])
    assert torch.equal(shards.whole("w", (2,)), WHOLE[2])
    with pytest.raises(AssertionError, match="fetch comes first"):
        shards.whole("w", (1,))
