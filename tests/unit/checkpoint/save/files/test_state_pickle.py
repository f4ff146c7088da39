"""`StatePickles`: whatever changes from save to save, torch reads what its own pickle says."""

import io
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from trainsync.checkpoint.load.reshard.plan import Layout, Split
from trainsync.checkpoint.save.files.state_pickle import StatePickles
from trainsync.checkpoint.save.staging.staging import Staged, begin

from tests.unit.checkpoint.sharded import dtensor
from tests.unit.checkpoint.states import raw, states

LEAVES = [0, 1, -1, 2**70, True, False, 0.0, -0.0, 1.0, float("nan"), None, "", "1", b"1", (1, "a")]


def staged(state: Any) -> Staged:
    """A copy of ``state``."""
    return begin(state, lambda size, _: torch.empty(size, dtype=torch.uint8), _nothing).result()


def _nothing(_: torch.Tensor) -> bool:
    return False


def saved(state: Any, pickles: StatePickles | None = None) -> Any:
    """What torch reads of a copy of ``state``."""
    file = io.BytesIO()
    if pickles is None:
        torch.save(staged(state).state, file)
    else:
        torch.save(staged(state), file, pickle_module=pickles)
    file.seek(0)
    return torch.load(file, weights_only=True)


def exact(value: Any, seen: dict[int, int], storages: dict[int, int]) -> Any:
    """All that can be told of ``value``: types, bits, which tensors and storages are the same."""
    if isinstance(value, DTensor):
        spec = repr((value._spec.mesh, value.placements, value.shape, value.stride()))
        return "DTensor", spec, exact(value._local_tensor, seen, storages)
    if isinstance(value, torch.Tensor):
        place = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        layout = (value.dtype, value.shape, value.stride(), value.storage_offset())
        return seen.setdefault(id(value), len(seen)), place, layout, raw(value)
    inner: Any = repr(value)
    if isinstance(value, dict):
        inner = [(repr(key), exact(item, seen, storages)) for key, item in value.items()]
        inner.append(exact(vars(value), seen, storages) if type(value) is OrderedDict else None)
    elif isinstance(value, list | tuple):
        inner = [exact(item, seen, storages) for item in value]
    return type(value), inner


def assert_as_torch_says(sequence: list[Any]) -> None:
    pickles = StatePickles()
    for state in sequence:
        assert exact(saved(state, pickles), {}, {}) == exact(saved(state), {}, {})


def changed(value: Any, data: st.DataObject) -> Any:
    """``value`` with other leaves, other tensors, or tensors tied and untied."""
    if isinstance(value, torch.Tensor):
        kept, other, retyped = value, value.clone(), torch.ones_like(value, dtype=torch.float16)
        return data.draw(st.sampled_from([kept, other, retyped]))
    if isinstance(value, dict):
        return {key: changed(item, data) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(changed(item, data) for item in value)
    return data.draw(st.sampled_from([value, *LEAVES]))


@settings(max_examples=100, deadline=None)
@given(first=states, other=states, data=st.data())
def test_states_in_turn_read_as_if_each_were_pickled_by_itself(
    first: Any, other: Any, data: st.DataObject
) -> None:
    assert_as_torch_says([first, changed(first, data), changed(first, data), other, first])


@pytest.mark.parametrize("leaf", [*LEAVES, [1, [2]], {}, {1: 2}, {1, 2}, Counter("ab")], ids=repr)
def test_a_leaf_that_changes_is_read_anew(leaf: Any) -> None:
    tensor = torch.ones(2)
    assert_as_torch_says([{"w": tensor, "x": value} for value in (1, leaf, True, leaf, "a")])


def test_keys_that_are_equal_but_of_other_types_are_told_apart() -> None:
    tensor = torch.ones(2)
    assert_as_torch_says([{key: tensor} for key in (1, True, 1.0, "1", False, 0, (1,), (True,))])


def test_tied_and_untied_tensors_stay_so() -> None:
    one, two = torch.ones(4), torch.ones(4)
    assert_as_torch_says(
        [
            {"a": one, "b": [one]},
            {"a": one, "b": [two]},
            {"a": one, "b": [one.view(2, 2)]},
            {"a": one, "b": [one[1:]]},
            {"a": two, "b": [two]},
        ]
    )


def test_the_metadata_of_a_state_dict_is_read_anew() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    before = OrderedDict(state)
    before._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as modules do
    assert_as_torch_says([state, before, state])


def test_shards_that_lie_differently_are_told_apart() -> None:
    local = torch.arange(8.0).reshape(2, 4)
    by_rows = Layout((4, 4), (2,), (0, 1), (Split(0, 1),))
    by_groups = Layout((4, 4), (2,), (0, 1), (Split(0, 2),))
    turned = Layout((4, 4), (2,), (1, 0), (Split(0, 1),))
    assert_as_torch_says(
        [
            {"before": torch.ones(3), "w": dtensor(local * i, layout, 0), "after": torch.ones(5)}
            for i, layout in enumerate((by_rows, by_rows, by_groups, turned, turned, by_rows))
        ]
    )


class Custom:
    """Allowed by who saves it; may hold anything."""

    def __init__(self, held: object) -> None:
        self.held = held


def test_an_object_of_an_allowed_class_is_left_to_torch() -> None:
    pickles = StatePickles()
    with torch.serialization.safe_globals([Custom]):
        for held in (1, torch.ones(2), torch.zeros(2)):
            read = saved({"w": torch.ones(2), "x": Custom(held)}, pickles)
            assert repr(read["x"].held) == repr(held)


def test_tensors_are_pickled_once_as_long_as_they_look_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pickles = StatePickles()
    saved({"w": torch.ones(3), "lr": 0.1}, pickles)

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor is pickled again")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__reduce_ex__", refuse)
        read = saved({"w": torch.zeros(3), "lr": 0.2}, pickles)
    assert (read["w"].tolist(), read["lr"]) == ([0.0, 0.0, 0.0], 0.2)
