"""States of every shape for property tests, and functions to read and overwrite them."""

from typing import Any

import torch
from hypothesis import strategies as st


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


def content(value: Any) -> list[Any]:
    """Every leaf in order, tensors as (dtype, shape, bytes): equal only for bitwise equal
    states."""
    return [
        (leaf.dtype, leaf.shape, raw(leaf)) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves(value)
    ]
