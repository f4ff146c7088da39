"""Where the shards of a component are opened, and how tensors get out of them."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from trainsync.checkpoint.load.reshard.shard_files import forget_pages, open_shard, read_archive
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

    def is_mapped(self, path: str) -> bool:
        """Whether the tensors of the file, once opened, can be read as they are."""
        ...

    def open(self, path: str) -> Any:
        """The state in a file; only `copy` and `real` read its tensors.

        Raises:
            CorruptCheckpointError: it cannot be understood.
        """
        ...

    def load(self, path: str, map_location: str | torch.device = "cpu") -> Any:
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

    def __init__(self, locate: Callable[[str], Path]) -> None:
        self._locate = locate

    def is_mapped(self, path: str) -> bool:
        """See `ShardFiles`."""
        del path
        return True

    def open(self, path: str) -> Any:
        """See `ShardFiles`; the caller checks the file's digest, and keeps the file."""
        return open_shard(self._locate(path))

    def load(self, path: str, map_location: str | torch.device = "cpu") -> Any:
        """See `ShardFiles`; the caller checks the file's digest."""
        file = self._locate(path)
        return read_archive(file, str(file), map_location=map_location, mmap=False)

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


def in_pieces(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """The same, cut so far that `span` of each is `AT_ONCE` at most: the bytes between the first
    and the last element of a few columns are nearly all bytes of a tensor."""
    for path, target, source in pairs:
        size = span(source)
        if size <= AT_ONCE:
            yield path, target, source
            continue
        lengths = enumerate(source.shape)
        # Along another dimension each piece would span nearly all of the tensor, too.
        dim = max((dim for dim, length in lengths if length > 1), key=source.stride)
        cuts = min(-(-size // AT_ONCE), source.shape[dim])
        both = zip(target.chunk(cuts, dim), source.chunk(cuts, dim), strict=True)
        yield from in_pieces((path, some, of) for some, of in both)


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element in memory to the last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes, in order, are its elements."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy_memory(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Fill the first of each pair from the second, which is in memory."""
    plain = []
    for target, source in pairs:
        if target.device.type == "cpu" and is_plain(target) and is_plain(source):
            plain.append(Copy(target.data_ptr(), source.data_ptr(), target.nbytes))
        else:
            target.copy_(source)
    copy_all(plain, _THREADS)


def _copy(pairs: list[Pair]) -> None:
    copy_memory([(target, source) for _, target, source in pairs])
    for _, _, source in pairs:
        forget_pages(source)
