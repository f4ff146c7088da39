"""Models and optimizers of one rank out of a store: those of a volume, and by ranges."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load import stored_shards
from trainsync.checkpoint.load.reshard import files as files_module
from trainsync.checkpoint.load.reshard import read as read_module
from trainsync.checkpoint.load.reshard.files import copy_memory
from trainsync.checkpoint.load.reshard.model import ModelLoad
from trainsync.checkpoint.load.reshard.optimizer import OptimizerLoad
from trainsync.checkpoint.load.reshard.plan import Layout
from trainsync.checkpoint.load.reshard.read import ComponentRead
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.load.stored_shards import StoredShards

from tests.unit.checkpoint.in_store import InStore
from tests.unit.checkpoint.load.reshard.test_model import Model, fsdp, local
from tests.unit.checkpoint.sharded import arange, dtensor, layouts, save, shapes, sharded, shards

BLOCK = 4096


@pytest.fixture
def put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[InStore, Component]]:
    """Puts the states of all ranks of a component into a store."""
    count = 0

    def make(
        name: str, states: dict[int, Any], world_size: int, block: int | None = BLOCK
    ) -> tuple[InStore, Component]:
        nonlocal count
        count += 1
        directory = tmp_path / str(count)
        component = save(directory, name, states, world_size)
        paths = [component.path(rank) for rank in states]
        files = {path: (directory / path).read_bytes() for path in paths}
        return InStore(monkeypatch, files, block), component

    return make


def reading(there: InStore, component: Component, rank: int, world_size: int) -> ComponentRead:
    assert there.resume.store is not None
    return ComponentRead(
        StoredShards(there.resume, there.resume.store), component, rank, world_size
    )


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
@given(
    shapes.flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape))),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    st.sampled_from([256, None]),
)
def test_any_mesh_loads_what_any_other_saved(
    put: Callable[..., tuple[InStore, Component]],
    case: tuple[Layout, Layout],
    dtype: torch.dtype,
    block: int | None,
) -> None:
    saved, live = case
    full = arange(saved.shape).to(dtype)
    states = {rank: {"w": tensor} for rank, tensor in sharded(full, saved).items()}
    there, component = put("model", states, len(saved.ranks), block)
    for rank, expected in shards(full, live).items():
        model = Model({"w": dtensor(torch.zeros_like(expected), live, rank)})
        load = ModelLoad(reading(there, component, rank, len(live.ranks)), model, rank)
        load.read()
        assert not bool(local(model.w.data).float().any()), "nothing has changed yet"
        there.counted.ranges.clear()
        load.apply()
        assert there.counted.ranges == [], "after reading nothing can fail any more"
        got = local(model.w.data)
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def adam(rank: int, first: dict[int, DTensor], second: dict[int, DTensor], step: float) -> Any:
    state = {"step": torch.tensor(step), "exp_avg": first[rank], "exp_avg_sq": second[rank]}
    group = {"lr": torch.tensor(0.25), "betas": (0.9, 0.99), "params": [0]}
    return {"state": {0: state | {"past": [torch.ones(3)]}}, "param_groups": [group]}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("block", [BLOCK, None])
def test_moments_are_cut_anew_and_the_rest_is_copied(
    put: Callable[..., tuple[InStore, Component]], world_size: int, block: int | None
) -> None:
    shape = (64, 256)
    first, second = arange(shape, torch.float32), arange(shape, torch.float32) / 3
    cut = sharded(first, fsdp(shape, 2)), sharded(second, fsdp(shape, 2))
    there, component = put("optim", {rank: adam(rank, *cut, 7.0) for rank in (0, 1)}, 2, block)
    for rank, expected in shards(first, fsdp(shape, world_size)).items():
        live = dtensor(torch.zeros_like(expected), fsdp(shape, world_size), rank)
        parameter = torch.nn.Parameter(live)
        optimizer = torch.optim.AdamW([parameter], lr=1.0)
        load = OptimizerLoad(reading(there, component, rank, world_size), optimizer, rank)
        load.read()
        assert not optimizer.state
        there.counted.ranges.clear()
        load.apply()
        assert there.counted.ranges == []
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"]._local_tensor, expected)
        assert float(state["step"]) == 7.0
        assert torch.equal(state["past"][0], torch.ones(3))
        assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_a_rank_of_more_reads_its_part_of_each_tensor_and_not_the_files(
    put: Callable[..., tuple[InStore, Component]],
) -> None:
    shape = (512, 256)  # 256 KiB in each of two files
    full = arange(shape, torch.float32)
    states = {rank: {"w": tensor} for rank, tensor in sharded(full, fsdp(shape, 2)).items()}
    there, component = put("model", states, 2)
    live = fsdp(shape, 8)
    model = Model({"w": dtensor(torch.zeros(64, 256), live, 1)})
    load = ModelLoad(reading(there, component, 1, 8), model, 1)
    load.read()
    load.apply()
    assert torch.equal(local(model.w.data), full[64:128])
    needed = 64 * 256 * 4
    assert needed < there.counted.bytes < needed + 14 * BLOCK
    # Its counterpart, rank 1, has none of it: of that file the index alone is read.
    counterpart = [end - start for key, start, end in there.counted.of_data if key.endswith("1.pt")]
    assert 0 < sum(counterpart) <= 8 * BLOCK


def test_as_many_ranks_read_their_own_files_alone_and_once(
    put: Callable[..., tuple[InStore, Component]],
) -> None:
    shape = (512, 256)
    states = {
        rank: {"w": tensor}
        for rank, tensor in sharded(arange(shape, torch.float32), fsdp(shape, 2)).items()
    }
    there, component = put("model", states, 2)
    model = Model({"w": dtensor(torch.zeros(256, 256), fsdp(shape, 2), 1)})
    load = ModelLoad(reading(there, component, 1, 2), model, 1)
    load.read()
    (key,) = {key for key, _, _ in there.counted.of_data}
    assert key.endswith("rank_1.pt")
    assert there.counted.bytes < there.resume.entry(key).bytes + 6 * BLOCK


def test_a_few_columns_of_a_large_tensor_are_read_bit_by_bit(
    put: Callable[..., tuple[InStore, Component]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stored_shards, files_module):
        monkeypatch.setattr(module, "AT_ONCE", 5000)
    largest = 0
    empty = torch.empty

    def counting(*shape: Any, **how: Any) -> torch.Tensor:
        nonlocal largest
        made = empty(*shape, **how)
        if made.dtype == torch.uint8:
            largest = max(largest, made.nbytes)
        return made

    saved = arange((3, 4, 100, 64), torch.float32)
    there, component = put("model", {0: {"w": saved}}, 1)
    assert there.resume.store is not None
    files = StoredShards(there.resume, there.resume.store)
    source = files.open(component.path(0))["w"][1:, :, :, 3:5]
    target = torch.zeros(2, 4, 100, 2)
    monkeypatch.setattr(torch, "empty", counting)
    files.copy([(component.path(0), target, source)])
    assert torch.equal(target, saved[1:, :, :, 3:5])
    assert 0 < largest <= 5000


def test_a_transposed_shard_is_not_read_again_for_each_piece(
    put: Callable[..., tuple[InStore, Component]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stored_shards, files_module):
        monkeypatch.setattr(module, "AT_ONCE", 16 << 10)
    saved = arange((256, 256), torch.float32).t()
    there, component = put("model", {0: {"w": saved}}, 1)
    assert there.resume.store is not None
    files = StoredShards(there.resume, there.resume.store)
    target = torch.zeros(256, 256)
    files.copy([(component.path(0), target, files.open(component.path(0))["w"])])
    assert torch.equal(target, saved)
    assert there.counted.bytes < 2 * saved.nbytes


def test_conjugates_and_negatives_of_a_foreign_file_have_their_values(
    put: Callable[..., tuple[InStore, Component]],
) -> None:
    saved = torch.tensor([1 + 2j, 3 - 4j])
    there, component = put("model", {0: {"w": saved.conj(), "v": saved.clone().conj().imag}}, 1)
    assert there.resume.store is not None
    files, path = StoredShards(there.resume, there.resume.store), component.path(0)
    state = files.real(path, files.open(path))
    assert torch.equal(state["w"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(state["v"], torch.tensor([-2.0, 4.0]))
    copied = torch.zeros(2)
    copy_memory([(copied, saved.conj().imag)])
    assert torch.equal(copied, state["v"])


def test_defaults_of_torch_do_not_change_a_load(
    put: Callable[..., tuple[InStore, Component]],
) -> None:
    shape = (64, 256)
    full = arange(shape, torch.float32)
    states = {rank: {"w": tensor} for rank, tensor in sharded(full, fsdp(shape, 2)).items()}
    there, component = put("model", states, 2)
    model = Model({"w": torch.zeros(shape)})
    with torch.utils.serialization.config.patch("load.mmap", True), torch.device("meta"):
        load = ModelLoad(reading(there, component, 0, 1), model, 0)
        load.read()
        load.apply()
    assert torch.equal(model.w.data, full)


def test_what_ranks_must_have_alike_is_compared_bit_by_bit(
    put: Callable[..., tuple[InStore, Component]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stored_shards, files_module, read_module):
        monkeypatch.setattr(module, "AT_ONCE", 5000)
    largest, real = 0, StoredShards.real

    def counting(self: StoredShards, path: str, value: Any) -> Any:
        nonlocal largest
        if isinstance(value, list):
            largest = max(largest, sum(tensor.nbytes for tensor in value))
        return real(self, path, value)

    monkeypatch.setattr(StoredShards, "real", counting)
    states = {rank: {"w": torch.ones(100, 100)} for rank in (0, 1)}
    there, component = put("model", states, 2)
    model = Model({"w": torch.zeros(100, 100)})
    load = ModelLoad(reading(there, component, 0, 1), model, 0)
    load.read()
    load.apply()
    assert torch.equal(model.w.data, torch.ones(100, 100))
    assert 0 < largest <= 10_000
    states[1]["w"][99, 99] = 2
    there, component = put("model", states, 2)
    load = ModelLoad(reading(there, component, 0, 1), model, 0)
    with pytest.raises(StateMismatchError, match=r"w is a plain tensor that differs between ranks"):
        load.read()


def test_plain_parameters_that_differ_between_ranks_are_refused(
    put: Callable[..., tuple[InStore, Component]],
) -> None:
    states = {rank: {"w": torch.ones(5000) * rank} for rank in (0, 1)}
    there, component = put("model", states, 2)
    load = ModelLoad(reading(there, component, 0, 1), Model({"w": torch.zeros(5000)}), 0)
    with pytest.raises(StateMismatchError, match=r"w is a plain tensor that differs between ranks"):
        load.read()


@pytest.mark.parametrize("at", [10, -10, 20_000])
def test_a_changed_byte_is_refused_before_anything_live_changes(
    put: Callable[..., tuple[InStore, Component]], at: int
) -> None:
    there, component = put("model", {0: {"w": torch.ones(10_000)}}, 1)
    there.flip(component.path(0), at)
    model = Model({"w": torch.zeros(10_000)})
    with pytest.raises(
        CorruptCheckpointError, match=r"rank_0\.pt has digest .*, expected .* was told"
    ):
        ModelLoad(reading(there, component, 0, 1), model, 0).read()
    assert len(there.reports) == 1
    assert not bool(model.w.data.any())


def test_a_tensor_that_was_not_read_cannot_be_used(
    put: Callable[..., tuple[InStore, Component]],
) -> None:
    there, component = put("model", {0: {"w": torch.ones(5000)}}, 1)
    state = reading(there, component, 0, 1).state
    with pytest.raises(NotImplementedError, match="meta tensor"):
        torch.zeros(5000).copy_(state["w"])


def test_a_file_whose_index_says_too_much_is_refused(
    put: Callable[..., tuple[InStore, Component]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, component = put("model", {0: {"w": torch.ones(5000)}}, 1)
    load = ModelLoad(reading(there, component, 0, 1), Model({"w": torch.zeros(5000)}), 0)
    monkeypatch.setattr(stored_shards, "_offset", lambda tensor: 10_000)
    with pytest.raises(CorruptCheckpointError, match=r"rank_0\.pt has tensors beyond its end"):
        load.read()


def test_a_torch_that_does_not_tell_offsets_reads_whole_files(
    put: Callable[..., tuple[InStore, Component]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_shards, "_offset", lambda tensor: None)
    shape = (64, 256)
    full = arange(shape, torch.float32)
    states = {rank: {"w": tensor} for rank, tensor in sharded(full, fsdp(shape, 2)).items()}
    there, component = put("model", states, 2)
    model = Model({"w": torch.zeros(shape)})
    load = ModelLoad(reading(there, component, 0, 1), model, 0)
    load.read()
    load.apply()
    assert torch.equal(model.w.data, full)
