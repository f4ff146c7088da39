"""Where the shards of a component are opened, and how tensors get out of them."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from trainsync.checkpoint.load.reshard.shard_files import forget_pages, open_shard
from trainsync.checkpoint.save.staging.copy import Copy, copy_all

# More fill the memory bus, and the threads of the ranks beside this one copy, too.
_THREADS: Final = min(os.cpu_count() or 1, 8)
AT_ONCE: Final = 64 << 20
"""Bytes that are in this process's memory beside their targets while it copies."""

Pair = tuple[str, torch.Tensor, torch.Tensor]
"""The file that a tensor is of, what is filled, and the tensor (or a part of it) as it was opened.
Both have one shape and dtype."""


class ShardFiles(Protocol):
    """The files of one step, by their path in it."""

    mapped: bool
    """Whether the tensors of an opened file can be read as they are."""

    def open(self, path: str) -> Any:
        """The state in a file; only `copy` and `real` read its tensors.

        Raises:
            CorruptCheckpointError: it cannot be understood.
        """
        ...

    def load(self, path: str) -> Any:
        """The state in a file, whose tensors own their memory. Raises as `open`."""
        ...

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Fill the one of each pair from the other."""
        ...

    def real(self, path: str, value: Any) -> Any:
        """A part of what `open` gave, with tensors that can be read as they are."""
        ...


class MappedShards:
    """Files of a volume, or in memory: mapped, and only what is used of them is read.

    Args:
        locate: where to open a file.
    """

    mapped = True

    def __init__(self, locate: Callable[[str], Path]) -> None:
        self._locate = locate

    def open(self, path: str) -> Any:
        """See `ShardFiles`; the caller checks the file's digest, and keeps the file."""
        return open_shard(self._locate(path))

    def load(self, path: str) -> Any:
        """See `ShardFiles`; the caller checks the file's digest."""
        return open_shard(self._locate(path), mapped=False)

    def copy(self, pairs: Iterable[Pair]) -> None:
        """See `ShardFiles`. What was read does not stay in the memory of this process."""
        held: list[Pair] = []
        size = 0
        for pair in pairs:
            held.append(pair)
            size += pair[1].nbytes
            if size >= AT_ONCE:
                _copy(held)
                held, size = [], 0
        _copy(held)

    def real(self, path: str, value: Any) -> Any:
        """See `ShardFiles`."""
        del path
        return value


def copy_memory(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Fill the first of each pair from the second, which is in memory."""
    plain = []
    for target, source in pairs:
        if target.device.type == "cpu" and target.is_contiguous() and source.is_contiguous():
            plain.append(Copy(target.data_ptr(), source.data_ptr(), target.nbytes))
        else:
            target.copy_(source)
    copy_all(plain, _THREADS)


def _copy(pairs: list[Pair]) -> None:
    copy_memory([(target, source) for _, target, source in pairs])
    for _, _, source in pairs:
        forget_pages(source)
