"""Models and optimizers of one rank, out of the files of however many ranks saved them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial
from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.reshard.files import MappedShards
from trainsync.checkpoint.load.reshard.model import ModelLoad
from trainsync.checkpoint.load.reshard.optimizer import OptimizerLoad, match_groups
from trainsync.checkpoint.load.reshard.plan import Layout, Split
from trainsync.checkpoint.load.reshard.read import ComponentRead
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.state_names import model_state

from tests.unit.checkpoint.sharded import arange, dtensor, layouts, save, shapes, sharded, shards


class Model(torch.nn.Module):
    """Parameters and buffers as they are given."""

    def __init__(self, tensors: dict[str, torch.Tensor], buffers: tuple[str, ...] = ()) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if name in buffers:
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def fsdp(shape: tuple[int, ...], world_size: int) -> Layout:
    return Layout(shape, (world_size,), tuple(range(world_size)), (Split(0),))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def files(directory: Path) -> MappedShards:
    return MappedShards(directory.joinpath)


def load_model(
    directory: Path, component: Component, model: torch.nn.Module, rank: int, world_size: int
) -> ModelLoad:
    load = ModelLoad(ComponentRead(files(directory), component, rank, world_size), model, rank)
    load.read()
    return load


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(
    shapes.flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape))),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_any_mesh_loads_what_any_other_saved(
    tmp_path: Path, case: tuple[Layout, Layout], dtype: torch.dtype
) -> None:
    saved, live = case
    full = arange(saved.shape).to(dtype)
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    states = {rank: {"w": tensor} for rank, tensor in sharded(full, saved).items()}
    component = save(directory, "model", states, len(saved.ranks))
    for rank, expected in shards(full, live).items():
        model = Model({"w": dtensor(torch.zeros_like(expected), live, rank)})
        load = load_model(directory, component, model, rank, len(live.ranks))
        assert not bool(local(model.w.data).float().any())  # nothing has changed yet
        load.apply()
        got = local(model.w.data)
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_a_model_that_was_not_sharded_is_loaded_sharded_and_back(tmp_path: Path) -> None:
    full = arange((5, 3), torch.float32)
    whole = save(tmp_path / "whole", "model", {0: {"w": full}}, 1)
    for rank, expected in shards(full, fsdp((5, 3), 2)).items():
        model = Model({"w": dtensor(torch.zeros_like(expected), fsdp((5, 3), 2), rank)})
        load_model(tmp_path / "whole", whole, model, rank, 2).apply()
        assert torch.equal(local(model.w.data), expected)
    cut = save(
        tmp_path / "cut",
        "model",
        {rank: {"w": tensor} for rank, tensor in sharded(full, fsdp((5, 3), 2)).items()},
        2,
    )
    model = Model({"w": torch.zeros(5, 3)})
    load_model(tmp_path / "cut", cut, model, 0, 1).apply()
    assert torch.equal(model.w.data, full)


def test_a_replicated_model_is_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    full = arange((4,), torch.float32)
    component = save(tmp_path, "model", {rank: {"w": full, "b": full + rank} for rank in (0, 1)}, 2)
    model = Model({"w": torch.zeros(4), "b": torch.zeros(4)}, buffers=("b",))
    load_model(tmp_path, component, model, 2, 3).apply()
    assert torch.equal(model.w.data, full)
    assert torch.equal(model.b, full)  # of rank 0, as DistributedDataParallel does
    load_model(tmp_path, component, model, 1, 2).apply()
    assert torch.equal(model.b, full + 1)  # its own, where it has one


def test_state_saved_by_rank_0_alone_is_loaded_by_every_rank(tmp_path: Path) -> None:
    component = save(tmp_path, "model", {0: {"w": torch.ones(3)}}, 4)
    for rank, world_size in ((3, 4), (1, 2)):
        model = Model({"w": torch.zeros(3)})
        load_model(tmp_path, component, model, rank, world_size).apply()
        assert torch.equal(model.w.data, torch.ones(3))


def test_plain_parameters_that_differ_between_ranks_are_refused_elsewhere(tmp_path: Path) -> None:
    component = save(tmp_path, "model", {rank: {"w": torch.ones(2) * rank} for rank in (0, 1)}, 2)
    with pytest.raises(StateMismatchError, match=r"w is a plain tensor that differs between ranks"):
        load_model(tmp_path, component, Model({"w": torch.zeros(2)}), 0, 1)
    # As many ranks: each gets its own (experts, for instance); but never as a shard of a whole.
    load_model(tmp_path, component, Model({"w": torch.zeros(2)}), 0, 2)
    live = dtensor(torch.zeros(1), fsdp((2,), 2), 0)
    with pytest.raises(StateMismatchError, match="differs between ranks"):
        load_model(tmp_path, component, Model({"w": live}), 0, 2)


@pytest.mark.parametrize(
    ("live", "why"),
    [
        ({"v": torch.zeros(2)}, "the checkpoint lacks v; the model lacks w"),
        ({"w": torch.zeros(3)}, r"float32 of shape \(3,\), in the checkpoint .* shape \(2,\)"),
        ({"w": torch.zeros(2, dtype=torch.bfloat16)}, r"w of the model is torch.bfloat16"),
        ({"w": torch.zeros(2, device="meta")}, "w of the model is on the meta device"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, live: dict[str, torch.Tensor], why: str
) -> None:
    component = save(tmp_path, "model", {0: {"w": torch.zeros(2)}}, 1)
    with pytest.raises(StateMismatchError, match=why):
        load_model(tmp_path, component, Model(live), 0, 1)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    full = arange((4,), torch.float32)
    states = {rank: {"w": tensor} for rank, tensor in sharded(full, fsdp((4,), 2)).items()}
    other = sharded(arange((8,), torch.float32), fsdp((8,), 2))[1]
    for wrong, why in (
        ({"w": other}, r"w in actor/model_world_size_2_rank_1.pt is .* shape \(4,\).*\(2,\)"),
        ({"w": torch.zeros(2)}, "rank_1.pt is torch.float32"),
        ({}, "rank_1.pt has no tensor w"),
        ([1], "rank_1.pt holds a list"),
    ):
        component = save(tmp_path, "model", states | {1: wrong}, 2)
        with pytest.raises(CorruptCheckpointError, match=why):
            load_model(tmp_path, component, Model({"w": torch.zeros(4)}), 0, 1)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    component = save(tmp_path, "model", {rank: {} for rank in (0, 2)}, 3)
    with pytest.raises(CorruptCheckpointError, match=r"no actor/model_world_size_3_rank_1\.pt"):
        ComponentRead(files(tmp_path), component, 0, 1)


def test_a_sum_that_was_never_taken_is_refused(tmp_path: Path) -> None:
    tensor = dtensor(torch.zeros(4), fsdp((4,), 1), 0)
    tensor._spec.placements = (Partial(),)
    component = save(tmp_path, "model", {0: {"w": tensor}}, 1)
    with pytest.raises(StateMismatchError, match="expected Shard or Replicate"):
        load_model(tmp_path, component, Model({"w": torch.zeros(4)}), 0, 1)


# -- optimizers -----------------------------------------------------------------------------


def trained(tensors: list[torch.Tensor], *, named: bool = False) -> torch.optim.Optimizer:
    """An AdamW with state, of parameters that lie as ``tensors`` do."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    given: Any = (
        [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
        if named
        else parameters
    )
    optimizer = torch.optim.AdamW(given, lr=0.5, foreach=False)
    optimizer.step()
    return optimizer


def saved_adam(world_size: int, layout: Layout) -> dict[int, object]:
    """``optimizer.state_dict()`` of every rank, for one parameter of shape (5, 2)."""
    first, second = arange((5, 2), torch.float32), arange((5, 2), torch.float32) / 3
    moments, squares = sharded(first, layout), sharded(second, layout)
    return {
        rank: {
            "state": {
                0: {
                    "step": torch.tensor(7.0),
                    "exp_avg": moments[rank],
                    "exp_avg_sq": squares[rank],
                    "note": 11,
                }
            },
            "param_groups": [{"lr": 0.25, "betas": (0.9, 0.99), "params": [0]}],
        }
        for rank in range(world_size)
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_moments_are_cut_anew_and_the_rest_is_copied(tmp_path: Path, world_size: int) -> None:
    component = save(tmp_path, "optim", saved_adam(3, fsdp((5, 2), 3)), 3)
    live = fsdp((5, 2), world_size)
    for rank, expected in shards(arange((5, 2), torch.float32), live).items():
        parameter = torch.nn.Parameter(dtensor(torch.zeros_like(expected), live, rank))
        optimizer = torch.optim.AdamW([parameter], lr=1.0)
        load = OptimizerLoad(
            ComponentRead(files(tmp_path), component, rank, world_size), optimizer, rank
        )
        load.read()
        assert not optimizer.state
        load.apply()
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"]._local_tensor, expected)
        assert state["exp_avg"].placements == parameter.placements
        assert state["exp_avg"].shape == (5, 2)
        assert not isinstance(state["step"], DTensor)
        assert (float(state["step"]), state["note"]) == (7.0, 11)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["params"]) == (0.25, (0.9, 0.99), [parameter])


def test_parameters_are_matched_by_name_where_there_are_names(tmp_path: Path) -> None:
    saved = trained([torch.ones(2), torch.ones(3)], named=True)
    state = saved.state_dict()
    component = save(tmp_path, "optim", {0: state}, 1)
    one, two = (torch.nn.Parameter(torch.zeros(n)) for n in (3, 2))
    optimizer = torch.optim.AdamW([("p1", one), ("p0", two)])
    load = OptimizerLoad(ComponentRead(files(tmp_path), component, 0, 1), optimizer, 0)
    load.read()
    load.apply()
    assert torch.equal(optimizer.state[one]["exp_avg"], state["state"][1]["exp_avg"])
    assert torch.equal(optimizer.state[two]["exp_avg"], state["state"][0]["exp_avg"])
    assert optimizer.param_groups[0]["param_names"] == ["p1", "p0"]


def test_sums_of_a_wider_dtype_than_their_parameter_keep_it(tmp_path: Path) -> None:
    master = torch.tensor([1.0, 1.0 + 2**-20])
    state = {"state": {0: {"master": master}}, "param_groups": [{"params": [0]}]}
    component = save(tmp_path, "optim", {0: state}, 1)
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter])
    load = OptimizerLoad(ComponentRead(files(tmp_path), component, 0, 1), optimizer, 0)
    load.read()
    load.apply()
    assert optimizer.state[parameter]["master"].dtype == torch.float32
    assert torch.equal(optimizer.state[parameter]["master"], master)


def test_a_model_of_fsdp1_is_refused_with_what_was_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed.fsdp

    model = torch.nn.Sequential(Model({"w": torch.zeros(2)}))
    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Model)
    with pytest.raises(StateMismatchError, match=r"\(FSDP1\).*expected fully_shard"):
        model_state(model)


@pytest.mark.parametrize(
    ("live", "why"),
    [
        ([{"params": [0]}, {"params": [1]}], "has 1 parameter groups, this one 2"),
        ([{"params": [0]}], "has 2 parameters in the checkpoint, 1 in this optimizer"),
        ([{"params": [0, 1], "param_names": ["a", "c"]}], "group 0 of this optimizer lacks b"),
    ],
)
def test_other_groups_are_refused(live: list[dict[str, Any]], why: str) -> None:
    saved = [{"params": [0, 1], "param_names": ["a", "b"]}]
    with pytest.raises(StateMismatchError, match=why):
        match_groups(saved, live)


def test_flat_shards_of_fsdp1_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    flat = {
        "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(5)}},
        "param_groups": [{"params": [0]}],
    }
    component = save(tmp_path, "optim", {0: flat, 1: flat}, 2)
    parameter = torch.nn.Parameter(dtensor(torch.zeros(3, 2), fsdp((5, 2), 2), 0))
    for world_size in (2, 1):
        with pytest.raises(StateMismatchError, match=r"flat shards of FSDP1; expected a DTensor"):
            OptimizerLoad(
                ComponentRead(files(tmp_path), component, 0, world_size),
                torch.optim.AdamW([parameter]),
                0,
            )


@pytest.mark.parametrize(
    ("state", "error", "why"),
    [
        ({"lr": 1}, CorruptCheckpointError, "it has lr; expected state and param_groups"),
        (
            {"state": {"w": {}}, "param_groups": [{"params": ["w"]}]},
            StateMismatchError,
            "keyed by parameter names",
        ),
        (
            {"state": {5: {}}, "param_groups": [{"params": [0]}]},
            StateMismatchError,
            "parameter 5, which is in none",
        ),
        (
            {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]},
            StateMismatchError,
            r"exp_avg of parameter 0 has shape \(3,\) .* its parameter in the optimizer \(2,\)",
        ),
    ],
)
def test_other_optimizer_states_are_refused(
    tmp_path: Path, state: object, error: type[Exception], why: str
) -> None:
    component = save(tmp_path, "optim", {0: state}, 1)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(error, match=why):
        OptimizerLoad(ComponentRead(files(tmp_path), component, 0, 1), optimizer, 0)


def test_parameters_are_matched_by_name_whatever_wraps_the_model() -> None:
    saved = [{"params": [0, 1], "param_names": ["module._orig_mod.a", "module._orig_mod.b"]}]
    live = [{"params": [0, 1], "param_names": ["b", "a"]}]
    assert match_groups(saved, live) == {0: 1, 1: 0}
    assert match_groups(live, saved) == {0: 1, 1: 0}
