"""`stage`: the copy is complete on return, and nothing done later shows in it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.staging import stage


def heap(size: int, pinned: bool) -> torch.Tensor:
    assert not pinned
    return torch.full((size + 128,), 0xA5, dtype=torch.uint8)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, bit for bit (NaN and signed zero included)."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""


def scribble(tensor: torch.Tensor) -> None:
    """Overwrite every byte of the tensor's storage."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    storage.fill_(0x5A)


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.int16,
    torch.bool,
    torch.complex64,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = 1
    for length in shape:
        count *= length
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    base = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = base.reshape(shape)
    match draw(st.sampled_from(["as is", "transposed", "strided", "expanded", "parameter"])):
        case "transposed" if tensor.dim() >= 2:
            tensor = tensor.transpose(0, -1)
        case "strided" if tensor.dim() >= 1:
            tensor = tensor[::2]
        case "expanded":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        case "parameter":
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
    return tensor


states = st.recursive(
    st.one_of(tensors(), st.integers(), st.text(max_size=5), st.floats(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *leaves(value[key])]]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@settings(max_examples=200, deadline=None)
@given(state=states)
def test_what_happens_to_the_parameters_after_return_does_not_show(state: Any) -> None:
    originals = leaves(state)
    before = [raw(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in originals]
    staged = stage(state, heap)
    for leaf in originals:
        if isinstance(leaf, torch.Tensor):
            scribble(leaf)
    copies = leaves(staged.state)
    after = [raw(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in copies]
    assert after == before
    for original, copy in zip(originals, copies, strict=True):
        if isinstance(original, torch.Tensor):
            assert (copy.dtype, copy.shape) == (original.dtype, original.shape)
            assert type(copy) is torch.Tensor


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
