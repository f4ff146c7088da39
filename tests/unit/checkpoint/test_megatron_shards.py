"""Boxes of global tensors: whatever layout saved them, any box can be read."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.reshard.files import MappedShards
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.megatron_shards import (
    Box,
    MegatronShards,
    NotAllSavedError,
    is_megatron,
    pack,
    require,
)
from trainsync.checkpoint.shard_names import shard_file_name

LAYERS, ROWS, COLUMNS = 3, 8, 4
WHOLE = torch.arange(LAYERS * ROWS * COLUMNS, dtype=torch.float32).reshape(LAYERS, ROWS, COLUMNS)


def write(directory: Path, ranks: list[list[Box]], layout: dict[str, int]) -> MegatronShards:
    (directory / "actor").mkdir(parents=True)
    for rank, boxes in enumerate(ranks):
        path = directory / "actor" / shard_file_name("model", rank, len(ranks))
        torch.save(pack(boxes, layout), path)
    component = Component("model", "actor", len(ranks), frozenset(range(len(ranks))))
    return MegatronShards(MappedShards(directory.joinpath).open, component)


def box(layer: int, start: int, stop: int, *, data: torch.Tensor | None = None) -> Box:
    held = WHOLE[layer, start:stop].clone() if data is None else data
    return Box("w", (LAYERS, ROWS, COLUMNS), (layer, start, 0), 1, False, held)


def tensor_parallel(directory: Path, size: int) -> MegatronShards:
    part = ROWS // size
    ranks = [
        [box(layer, rank * part, (rank + 1) * part) for layer in range(LAYERS)]
        for rank in range(size)
    ]
    return write(directory, ranks, {"tp": size})


@given(
    saved=st.sampled_from([1, 2, 4, 8]),
    layer=st.integers(0, LAYERS - 1),
    rows=st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)),
    columns=st.tuples(st.integers(0, COLUMNS - 1), st.integers(1, COLUMNS)),
)
@settings(max_examples=60, deadline=None)
def test_any_box_is_put_together_from_those_that_were_saved(
    tmp_path_factory: pytest.TempPathFactory,
    saved: int,
    layer: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> None:
    shards = tensor_parallel(tmp_path_factory.mktemp("step") / "s", saved)
    height, width = min(rows[1], ROWS - rows[0]), min(columns[1], COLUMNS - columns[0])
    found = shards.read("w", (layer, rows[0], columns[0]), (1, height, width))
    wanted = WHOLE[layer, rows[0] : rows[0] + height, columns[0] : columns[0] + width]
    assert torch.equal(found, wanted)


def test_a_layer_that_one_rank_holds_alone_is_read_whole(tmp_path: Path) -> None:
    ranks = [[box(0, 0, ROWS)], [box(1, 0, ROWS), box(2, 0, ROWS)]]
    shards = write(tmp_path / "step", ranks, {"pp": 2})
    for layer in range(LAYERS):
        assert torch.equal(shards.whole("w", (layer,)), WHOLE[layer])
    assert shards.paths("w") == {f"actor/{shard_file_name('model', rank, 2)}" for rank in range(2)}


def test_a_part_that_no_rank_saved_is_damage(tmp_path: Path) -> None:
    shards = write(tmp_path / "step", [[box(0, 0, 3)], [box(0, 4, ROWS)]], {"tp": 2})
    with pytest.raises(CorruptCheckpointError, match="28 of 32 elements were saved"):
        shards.whole("w", (0,))
    with pytest.raises(CorruptCheckpointError, match="0 of 32 elements were saved"):
        shards.whole("w", (1,))


def test_a_padded_tensor_is_filled_up_with_zeros(tmp_path: Path) -> None:
    rows = torch.ones(5, 2)
    shards = write(tmp_path / "step", [[Box("e", (5, 2), (0, 0), 0, True, rows)]], {"tp": 1})
    require(shards, "e", (8, 2), "tp=2")
    found = shards.read("e", (4, 0), (4, 2))
    assert found.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert shards.read("e", (8, 0), (4, 2)).tolist() == [[0, 0]] * 4, "all of it fills up"


def test_a_box_beyond_a_tensor_that_is_not_padded_is_damage(tmp_path: Path) -> None:
    rows = torch.ones(5, 2)
    shards = write(tmp_path / "step", [[Box("e", (5, 2), (0, 0), 0, False, rows)]], {"tp": 1})
    with pytest.raises(NotAllSavedError, match="0 of 0 elements were saved"):
        shards.read("e", (8, 0), (4, 2))


def test_ranks_that_contradict_each_other_are_damage(tmp_path: Path) -> None:
    other = box(1, 0, ROWS, data=torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16))
    with pytest.raises(CorruptCheckpointError, match=r"bfloat16 of shape .* another rank's is"):
        write(tmp_path / "step", [[box(0, 0, ROWS)], [other]], {"pp": 2})


def test_a_missing_rank_and_a_foreign_file_are_damage(tmp_path: Path) -> None:
    write(tmp_path / "step", [[box(0, 0, ROWS)], [box(1, 0, ROWS)]], {"pp": 2})
    with pytest.raises(CorruptCheckpointError, match="has no actor/model_world_size_3_rank_1"):
        MegatronShards(
            MappedShards((tmp_path / "step").joinpath).open,
            Component("model", "actor", 3, frozenset({0, 2})),
        )
    path = tmp_path / "step/actor" / shard_file_name("model", 0, 2)
    torch.save({"w": torch.ones(1)}, path)
    with pytest.raises(CorruptCheckpointError, match="is not the shard of a Megatron model"):
        MegatronShards(
            MappedShards((tmp_path / "step").joinpath).open,
            Component("model", "actor", 2, frozenset({0, 1})),
        )


def test_another_model_is_refused_with_both_layouts(tmp_path: Path) -> None:
    shards = tensor_parallel(tmp_path / "step", 2)
    with pytest.raises(StateMismatchError, match=r"by tp=2 pp=1 .* in tp=4 pp=1; expected the"):
        require(shards, "w", (LAYERS, ROWS, 5), "tp=4 pp=1")
    with pytest.raises(StateMismatchError, match="has no other: it was saved by tp=2"):
        require(shards, "other", (1,), "tp=4")


def test_a_plain_state_dict_is_not_taken_for_a_megatron_shard() -> None:
    assert not is_megatron({"model.norm.weight": torch.ones(1)})
    assert is_megatron(pack([], {}))


@pytest.mark.parametrize("second", [(3, ROWS), (0, 4), (1, 2)])
def test_boxes_that_overlap_are_damage(tmp_path: Path, second: tuple[int, int]) -> None:
    ranks = [[box(0, 0, 4)], [box(1, *second), box(0, *second)]]
    with pytest.raises(
        CorruptCheckpointError, match=r"begins at \(0, .* was saved by another rank"
    ):
        write(tmp_path / "step", ranks, {"tp": 2})
