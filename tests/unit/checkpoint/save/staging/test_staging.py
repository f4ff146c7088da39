"""Immediate staging: the copy is complete on return, and nothing done later shows in it."""

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.save.staging.staging import Buffer, StagedState, begin

from tests.unit.checkpoint.states import content, leaves, scribble, states


def heap(size: int, pinned: bool) -> torch.Tensor:
    assert not pinned
    return torch.full((size + 128,), 0xA5, dtype=torch.uint8)


def stage(state: Any, buffer: Buffer) -> StagedState:
    return begin(state, buffer, lambda _: False).result()


@settings(max_examples=200, deadline=None)
@given(state=states)
def test_what_happens_to_the_parameters_after_return_does_not_show(state: Any) -> None:
    originals = leaves(state)
    before = content(state)
    staging = begin(state, heap, lambda _: False)
    for leaf in originals:
        if isinstance(leaf, torch.Tensor):
            scribble(leaf)
    staged = staging.result()
    assert content(staged.state) == before
    assert all(type(leaf) is not torch.nn.Parameter for leaf in leaves(staged.state))


def test_tied_weights_stay_one_tensor_and_are_copied_once() -> None:
    weight = torch.randn(100, 10)
    staged = stage({"embed": weight, "head": weight.view(100, 10), "other": weight.t()}, heap)
    assert staged.state["embed"].data_ptr() == staged.state["head"].data_ptr()
    assert torch.equal(staged.state["other"], weight.t())
    assert staged.bytes == 2 * 4032  # the transpose is another view; 4000 rounded up to 64


def test_a_conjugate_view_is_not_taken_for_its_base() -> None:
    base = torch.tensor([1 + 2j])
    staged = stage({"base": base, "conjugate": base.conj()}, heap).state
    assert staged["base"].item() == 1 + 2j
    assert staged["conjugate"].item() == 1 - 2j


def test_every_staged_tensor_has_a_storage_of_its_own_size() -> None:
    staged = stage({"a": torch.zeros(3), "b": torch.zeros(1000)}, heap).state
    assert staged["a"].untyped_storage().nbytes() == 12
    assert staged["b"].untyped_storage().nbytes() == 4000


def test_empty_tensors_have_no_neighbour_in_the_file() -> None:
    state = {
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "w": torch.ones(2),
        "last": torch.empty(0, dtype=torch.bfloat16),
    }
    file = io.BytesIO()
    torch.save(stage(state, heap).state, file)  # refuses storages of two dtypes at one address
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert content(loaded) == content(state)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2).as_subclass(Subclass),
    ],
    ids=["sparse", "meta", "subclass"],
)
def test_a_tensor_that_cannot_be_staged_is_refused_by_path(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\['w'\]"):
        stage({"w": tensor}, heap)


def test_what_was_copied_may_change_in_shape_before_the_copy_is_taken() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    tied = torch.ones(3)
    staging = begin({"w": parameter, "a": tied, "b": tied}, heap, lambda _: False)
    parameter.data = torch.zeros(7, dtype=torch.bfloat16)
    tied.resize_(1).zero_()
    copied = staging.result().state
    assert torch.equal(copied["w"], torch.arange(6.0).view(2, 3))
    assert torch.equal(copied["a"], torch.ones(3))
    assert copied["a"] is copied["b"]
