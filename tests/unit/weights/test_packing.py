"""Packing and unpacking without a process group; shards are tested in tests/distributed."""

import numpy as np
import pytest
import torch
from trainsync.weights.errors import InconsistentUploadError, UnsupportedWeightsError
from trainsync.weights.packing import Packer, unpack
from trainsync.weights.schema import Piece, Schema

STATE = {
    "bf16": torch.randn(7, 3).to(torch.bfloat16),
    "transposed": torch.randn(4, 6).t(),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 5),
    "bool": torch.tensor([True, False, True]),
    "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex128),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


def test_what_is_packed_comes_out_bit_for_bit() -> None:
    packed = Packer().pack(STATE, rank=0)
    data = packed.data.copy()
    data.flags.writeable = False  # as Ray gives it
    full = unpack([(data, Schema.decode(packed.schema.encode()))])
    assert list(full) == list(STATE)
    for name, tensor in STATE.items():
        assert full[name].dtype == tensor.dtype
        assert full[name].shape == tensor.shape
        expected = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(full[name].reshape(-1).view(torch.uint8), expected), name


def test_what_is_unpacked_is_the_callers_own() -> None:
    packed = Packer().pack({"w": torch.ones(4)}, rank=0)
    full = unpack([(packed.data, packed.schema)])
    full["w"].fill_(2)
    assert packed.data.view(np.float32)[0] == 1.0


def test_later_changes_of_the_parameters_do_not_show() -> None:
    weight = torch.ones(1000)
    packed = Packer().pack({"w": weight}, rank=0)
    weight.fill_(7)
    assert torch.equal(unpack([(packed.data, packed.schema)])["w"], torch.ones(1000))


def test_what_is_not_sharded_is_sent_by_rank_0_alone() -> None:
    packed = Packer().pack(STATE, rank=1)
    assert packed.schema.pieces == ()
    assert packed.data.size == 0


def test_memory_is_reused_from_version_to_version() -> None:
    packer = Packer()
    first = packer.pack({"w": torch.ones(1000)}, rank=0).data.ctypes.data
    assert packer.pack({"w": torch.zeros(900)}, rank=0).data.ctypes.data == first


def test_equal_weights_have_equal_digests_and_others_do_not() -> None:
    one = Packer().pack({"w": torch.ones(10)}, rank=0).digest
    assert Packer().pack({"w": torch.ones(10)}, rank=0).digest == one
    assert Packer().pack({"w": torch.ones(10).index_fill(0, torch.tensor(9), 2.0)}, 0).digest != one


@pytest.mark.parametrize(
    "value", [1.0, torch.zeros(2, 2).to_sparse(), torch.zeros(1, device="meta")]
)
def test_what_is_no_dense_tensor_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedWeightsError, match="extra"):
        Packer().pack({"extra": value}, rank=0)  # type: ignore[dict-item]


def test_an_array_that_is_too_short_is_refused() -> None:
    packed = Packer().pack({"w": torch.ones(100)}, rank=0)
    with pytest.raises(InconsistentUploadError, match="has 80 bytes at 0, expected 400"):
        unpack([(packed.data[:80], packed.schema)])


@pytest.mark.parametrize("dtype", ["no_such", "nn", "float64"])
def test_a_dtype_that_is_none_is_refused(dtype: str) -> None:
    schema = Schema((Piece("w", dtype, 4, (1,), (0,), (1,), 0),))
    with pytest.raises(InconsistentUploadError, match="unknown dtype"):
        unpack([(np.zeros(64, np.uint8), schema)])
