"""The tensors that a model takes: those of the checkpoint that the server was started from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from trainsync.weights.buckets.layout import TensorMeta, differences

_LENGTH_BYTES: Final = 8
_LARGEST_HEADER: Final = 100 << 20  # as safetensors has it
# As safetensors names them, and torch with the bytes of an element.
_DTYPES: Final = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
}
_FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
TIED_HEAD: Final = "lm_head.weight"


def checkpoint_tensors(folder: Path) -> list[TensorMeta] | None:
    """The tensors of a Hugging Face checkpoint; None if it has no safetensors files.

    Raises:
        OSError: it cannot be read.
        ValueError: a file is not of safetensors.
    """
    return [meta for file in _files(folder) for meta in _header(file)] or None


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors of a Hugging Face checkpoint in safetensors files, mapped as they are asked for.

    None is to be used after the block.

    Raises:
        OSError: it cannot be read.
        ValueError: a file is not of safetensors.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for file in _files(folder):
            try:
                opened = stack.enter_context(safe_open(file, "pt"))
            except SafetensorError as error:
                raise ValueError(f"{file} is no file of safetensors: {error}") from error
            files |= dict.fromkeys(opened.keys(), opened)
        yield _OpenCheckpoint(files)


class _OpenCheckpoint(Mapping[str, torch.Tensor]):
    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    # A folder may hold the same weights in another form, too.
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    return [folder / name for name in names]


def misfit(
    takes: Sequence[TensorMeta], offered: Sequence[TensorMeta], dtype: str, *, tied: bool
) -> str | None:
    """Why the offered tensors are not those that the model takes; None when they are.

    Args:
        dtype: of the model; floating-point tensors may come in it, or in the checkpoint's.
        tied: whether the head is the embedding, so that its tensor may come or not.
    """
    given = {meta.name: meta for meta in offered}
    wanted = [_in(meta, given.get(meta.name), dtype) for meta in takes]
    if tied:
        wanted = [meta for meta in wanted if meta.name != TIED_HEAD]
        offered = [meta for meta in offered if meta.name != TIED_HEAD]
    return differences(wanted, offered)


def _in(meta: TensorMeta, given: TensorMeta | None, dtype: str) -> TensorMeta:
    """``meta`` in the model's dtype if it comes in it."""
    if given is None or given.dtype != dtype or not {meta.dtype, dtype} <= _FLOATS:
        return meta
    return TensorMeta(meta.name, dtype, given.itemsize, meta.shape)


def _header(file: Path) -> list[TensorMeta]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"{file} is no file of safetensors")
        header: Mapping[str, dict[str, object]] = json.loads(opened.read(length))
    return [_meta(name, row) for name, row in header.items() if name != "__metadata__"]


def _meta(name: str, row: Mapping[str, object]) -> TensorMeta:
    dtype, shape = row["dtype"], row["shape"]
    known = _DTYPES.get(str(dtype))
    if known is None or not isinstance(shape, list):
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    return TensorMeta(name, *known, tuple(shape))
