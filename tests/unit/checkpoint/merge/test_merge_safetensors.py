"""The layout of safetensors files, and their bytes."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from trainsync.checkpoint.merge.safetensors import TensorEntry, partition, write


def test_files_are_filled_in_order_and_wide_elements_come_first() -> None:
    entries = [
        TensorEntry("a", torch.uint8, (3,)),
        TensorEntry("b", torch.float32, (2,)),
        TensorEntry("c", torch.bfloat16, (100,)),
        TensorEntry("d", torch.uint8, ()),
        TensorEntry("e", torch.uint8, (0, 5)),
    ]
    names = [[entry.name for entry in file] for file in partition(entries, 11)]
    assert names == [["b", "a"], ["c"], ["d", "e"]]


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.float8_e4m3fn, torch.int16, torch.bool, torch.uint8],
)
def test_what_is_written_is_what_safetensors_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = [torch.arange(6).reshape(2, 3).to(dtype), torch.zeros(0, 2, dtype=dtype)]
    entries = [TensorEntry(f"t{n}", dtype, tuple(t.shape)) for n, t in enumerate(tensors)]
    told: list[int] = []
    write(tmp_path / "x.safetensors", entries, iter(tensors), told.append)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        for number, tensor in enumerate(tensors):
            found = file.get_tensor(f"t{number}")
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert sum(told) == 6 * dtype.itemsize
