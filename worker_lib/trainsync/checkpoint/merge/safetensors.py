"""Write safetensors files tensor by tensor, so that a model need not be in memory to be written.

The format: eight bytes with the length of a JSON header, the header, then the bytes of the tensors
without a gap (https://github.com/huggingface/safetensors#format).
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from trainsync.checkpoint.errors import MergeError
from trainsync.checkpoint.save.files.stream import Writeback

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SLICE: Final = 8 << 20  # of one write, after which progress is told


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor's elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def partition(entries: Sequence[TensorEntry], most: int) -> list[list[TensorEntry]]:
    """Entries of each file, in order: at most ``most`` bytes, unless one tensor alone is larger.

    Within a file, larger dtypes come first: readers want every tensor aligned to its elements.
    """
    files: list[list[TensorEntry]] = []
    size = 0
    for entry in entries:
        if not files or (size + entry.bytes > most and files[-1]):
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.bytes
    return [sorted(file, key=lambda entry: -entry.dtype.itemsize) for file in files]


def write(
    path: Path,
    entries: Sequence[TensorEntry],
    tensors: Iterable[torch.Tensor],
    on_bytes: Callable[[int], None],
) -> None:
    """Write a new file, durably.

    Args:
        tensors: in the order of ``entries``, each asked for when it is written.
        on_bytes: told the bytes of every write.

    Raises:
        MergeError: a dtype that the format does not have.
        OSError: the disk failed.
    """
    header = _header(entries)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with os.fdopen(fd, "wb") as file:
        written = file.write(len(header).to_bytes(8, "little") + header)
        writeback = Writeback(fd, forget=True)
        for entry, tensor in zip(entries, tensors, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _SLICE):
                count = file.write(data[start : start + _SLICE])
                written += count
                writeback.written(written)
                on_bytes(count)
        file.flush()
        os.fsync(fd)


def _header(entries: Sequence[TensorEntry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise MergeError(f"{entry.name} is {entry.dtype}, which safetensors has not")
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    data = json.dumps(header, separators=(",", ":")).encode()
    return data + b" " * (-len(data) % 8)
