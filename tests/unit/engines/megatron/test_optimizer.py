"""Flat pieces of an optimizer's buffer as boxes; and its state into pieces of another layout."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.load.reshard.files import MappedShards
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.megatron_shards import MegatronShards, pack
from trainsync.checkpoint.shard_names import shard_file_name
from trainsync.engines.megatron import optimizer as megatron_optimizer
from trainsync.engines.megatron.optimizer import OptimizerShard, flat_boxes, own_boxes, pieces

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shape=SHAPES, ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@settings(max_examples=300, deadline=None)
def test_boxes_are_the_elements_of_the_range_in_their_order(
    shape: tuple[int, ...], ends: tuple[float, float]
) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    begin, end = sorted(round(share * whole.numel()) for share in ends)
    boxes = list(flat_boxes(shape, begin, end))
    found: list[int] = []
    for start, size in boxes:
        box = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        assert box.is_contiguous() or box.numel() == 1
        found += box.reshape(-1).tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


class Optimizer:
    """A data parallel rank of Megatron's distributed optimizer of one weight: it has a range."""

    distributed_optimizer_instance_id = 0

    def __init__(self, weight: torch.Tensor, start: int, end: int) -> None:
        self.weight = torch.nn.Parameter(weight)
        self.model_param_gbuf_map = {self.weight: None}
        self.range = SimpleNamespace(start=start, end=end)
        length = end - start
        self.held = {"param": torch.zeros(length), "exp_avg": torch.zeros(length)}

    def _get_model_param_range_map(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {"param": self.range}

    def _get_main_param_and_optimizer_states(self, parameter: Any) -> dict[str, torch.Tensor]:
        return {**self.held, "step": torch.tensor(3.0)}

    def _set_main_param_and_optimizer_states(self, parameter: Any, given: Any) -> None:
        for name, tensor in self.held.items():
            tensor.copy_(given[name])


def gate_and_up(weight: torch.Tensor, rank: int, ranks: int) -> list[Any]:
    """A fused weight, as Megatron gives it: two parts of a global tensor, layer 1 of 3."""
    rows, columns = weight.shape[0] // 2, weight.shape[1]
    return [
        SimpleNamespace(
            key="fc1",
            data=part,
            global_shape=(3, 2 * rows * ranks, columns),
            global_offset=(1, (half * ranks + rank) * rows, 0),
            prepend_axis_num=1,
            allow_shape_mismatch=False,
            replica_id=(0, 0, 0),
        )
        for half, part in enumerate(weight.chunk(2))
    ]


def held_by(
    ranks: int, data_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Optimizer, list[OptimizerShard]]]:
    """The pieces of every rank: tensor parallel × data parallel, cut where no row begins."""
    found = []
    for rank in range(ranks):
        weight = torch.zeros(12 // ranks, 5)
        live = gate_and_up(weight, rank, ranks)
        monkeypatch.setattr(megatron_optimizer, "live_tensors", lambda chunks, live=live: live)
        cuts = [round(weight.numel() * n / data_parallel) for n in range(data_parallel + 1)]
        for start, end in itertools.pairwise(cuts):
            optimizer = Optimizer(weight, start, end)
            found.append((optimizer, pieces([optimizer], [])))
    return found


WHOLE = {
    "fp32_param": torch.arange(60.0).reshape(12, 5),
    "exp_avg": torch.arange(100.0, 160.0).reshape(12, 5),
}


def filled_from(shards: MegatronShards, held: list[tuple[Optimizer, list[OptimizerShard]]]) -> None:
    for _, parts in held:
        for piece in parts:
            state = {name: torch.empty(piece.length) for name in WHOLE}
            for name, flat in state.items():
                for region in piece.regions:
                    key = f"optimizer.state.{name}.{region.tensor.key}"
                    box = shards.read(key, region.start, region.size)
                    flat[region.elements] = box.reshape(-1)
            piece.fill(state, None)


def saved(
    directory: Path, held: list[tuple[Optimizer, list[OptimizerShard]]], name: str = "optim"
) -> MegatronShards:
    (directory / name).mkdir()
    for rank, (_, parts) in enumerate(held):
        path = directory / name / shard_file_name("optim", rank, len(held))
        torch.save(pack(own_boxes(parts), {"tp": 1}), path)
    component = Component("optim", name, len(held), frozenset(range(len(held))))
    return MegatronShards(MappedShards(directory.joinpath).open, component)


@pytest.mark.parametrize("before", [(1, 1), (2, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("after", [(1, 1), (2, 3), (6, 1)])
def test_what_one_layout_saved_another_has_and_saves_alike(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    pytest.importorskip("megatron.core")
    first = saved(tmp_path, whole_state(monkeypatch), "first")
    for name, layout in (("before", before), ("after", after)):
        held = held_by(*layout, monkeypatch)
        filled_from(first, held)
        first = saved(tmp_path, held, name)
        for state, expected in WHOLE.items():
            assert torch.equal(first.whole(f"optimizer.state.{state}.fc1", (1,)), expected)


def whole_state(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Optimizer, list[OptimizerShard]]]:
    held = held_by(1, 1, monkeypatch)
    optimizer = held[0][0]
    optimizer.held["param"].copy_(WHOLE["fp32_param"].reshape(-1))
    optimizer.held["exp_avg"].copy_(WHOLE["exp_avg"].reshape(-1))
    return held


def test_a_trained_weight_that_the_model_does_not_show_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.zeros(4, 5)
    live = gate_and_up(weight.clone(), 0, 1)
    monkeypatch.setattr(megatron_optimizer, "live_tensors", lambda chunks: live)
    with pytest.raises(UnsupportedStateError, match="is not where Megatron's sharded_state_dict"):
        pieces([Optimizer(weight, 0, 20)], [])
