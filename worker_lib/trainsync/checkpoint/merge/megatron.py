"""The weights of a merge out of a Megatron model's shards, one at a time, as files have them."""

from itertools import product
from pathlib import Path
from typing import Any

import torch

from trainsync.checkpoint.errors import MergeError
from trainsync.checkpoint.megatron_shards import MegatronShards
from trainsync.checkpoint.merge.megatron_names import HuggingFaceNames
from trainsync.checkpoint.merge.names import Names, check_complete
from trainsync.checkpoint.merge.safetensors import TensorEntry

_Source = tuple[str, tuple[int, ...]]  # key of a global tensor, index in its leading dimensions


class MegatronWeights:
    """Whole weights out of the shards of a Megatron model; see `merge.weights.MergedWeights`.

    Attributes:
        entries: what is to be written, in order.
        paths: files that are read.

    Args:
        folder: with the model's ``config.json``.
        dtype: of floating-point weights; None leaves each as it was saved.

    Raises:
        MergeError: mbridge does not know the model, or one of its weights.
    """

    def __init__(self, shards: MegatronShards, folder: Path, dtype: torch.dtype | None) -> None:
        self._shards = shards
        self._dtype = dtype
        self._names = HuggingFaceNames(_config(folder))
        self._sources: dict[str, _Source] = {}
        self._last: tuple[_Source, dict[str, torch.Tensor]] | None = None
        self.entries: list[TensorEntry] = []
        self.paths: set[str] = set()
        for key, tensor in sorted(shards.tensors.items()):
            self.paths |= shards.paths(key)
            leading, rest = tensor.shape[: tensor.leading], tensor.shape[tensor.leading :]
            for index in product(*(range(length) for length in leading)):
                meta = torch.empty(rest, dtype=tensor.dtype, device="meta")
                for name, part in self._names.convert(key, index, meta):
                    self._plan(name, part, (key, index))

    def fit(self, expected: Names) -> None:
        """See that files of the class would be complete. Raises `MergeError`."""
        names = frozenset(
            exported
            for name, tensor in expected.model.state_dict().items()
            for exported in expected.exported(name, tensor)
        )
        check_complete(self._sources, Names(names, expected.tied, expected.model))

    def leave_out_tied(self) -> list[str]:
        """Nothing: Megatron holds tied weights once."""
        return []

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """One of `entries`. What it is cut from is kept for the next one, and nothing else."""
        source = self._sources[entry.name]
        if self._last is None or self._last[0] != source:
            if self._last is not None:
                self._shards.forget_pages(*self._last[0])
            self._last = None  # one at a time in memory
            key, index = source
            whole = self._shards.whole(key, index)
            self._last = source, dict(self._names.convert(key, index, whole))
        return self._last[1][entry.name].to(entry.dtype)

    def _plan(self, name: str, part: torch.Tensor, source: _Source) -> None:
        if name in self._sources:
            raise MergeError(
                f"{source[0]} and {self._sources[name][0]} are both {name} in Hugging Face"
            )
        self._sources[name] = source
        floating = self._dtype is not None and part.dtype.is_floating_point
        dtype = self._dtype if floating and self._dtype is not None else part.dtype
        self.entries.append(TensorEntry(name, dtype, tuple(part.shape)))


def _config(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError) as error:
        raise MergeError(f"the model's config.json cannot be understood: {error}") from error
