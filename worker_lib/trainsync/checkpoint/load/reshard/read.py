"""Read a rank's part of a component out of the shards of however many ranks saved it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.reshard.plan import (
    BoxCopy,
    Layout,
    Spans,
    local_shape,
    pieces,
    plain,
)
from trainsync.checkpoint.load.reshard.shard_files import (
    Component,
    forget_pages,
    large_pages,
    layout_of,
    local_of,
    open_shard,
)
from trainsync.checkpoint.save.staging.copy import Copy, copy_all

Key = tuple[Any, ...]  # path into a state's nested mappings

# More fill the memory bus, and the threads of the ranks beside this one copy, too.
_THREADS: Final = min(os.cpu_count() or 1, 8)
_AT_ONCE: Final = 64 << 20  # bytes of files that are in this process's memory while it copies


@dataclass(frozen=True)
class _Want:
    name: str
    layout: Layout
    wanted: tuple[Spans, ...]
    dtype: torch.dtype
    pieces: tuple[BoxCopy, ...]


class ComponentRead:
    """One rank's reads of one component: planned first, then done in one go, file by file.

    Attributes:
        state: what the rank's counterpart among those that saved (`Component.home`) has; its
            tensors are mapped from the file.

    Args:
        directory: of the step.
        rank, world_size: of those that load.
        locate: where to open a file, by its path in the step; None: in ``directory``.
    """

    def __init__(
        self,
        directory: Path,
        component: Component,
        rank: int,
        world_size: int,
        locate: Callable[[str], Path] | None = None,
    ) -> None:
        self.component = component
        self.same_ranks = component.world_size == world_size or component.one_for_all
        self._locate = directory.joinpath if locate is None else locate
        self._home = component.home(rank, world_size)
        # A value that is not sharded is rank 0's on all ranks, unless each rank has its own again.
        self._plain_home = self._home if self.same_ranks else 0
        self.paths = {component.path(rank) for rank in (self._home, self._plain_home)}
        self.state = self._open(self._home)
        self._wants: dict[Key, _Want] = {}
        self._copies: dict[Key, int] = {}
        self._mapped: dict[int, Any] = {}

    def keeps(self, live: torch.Tensor) -> bool:
        """Whether ``live``, if it was a plain tensor when saved, may differ from rank to rank."""
        return self.same_ranks and not isinstance(live, DTensor)

    def layout(self, key: Key, name: str) -> Layout:
        """The layout of that tensor on the ranks that saved it."""
        return layout_of(name, self._tensor(self.state, self._home, key, name), self._home)

    def want(
        self, key: Key, name: str, wanted: tuple[Spans, ...], *, replicated: bool = False
    ) -> None:
        """Plan to read ``wanted`` of the tensor at ``key``.

        Args:
            name: for messages.
            replicated: where it is a plain tensor, all ranks that saved it must have had the
                same. It is compared with the last rank's.
        """
        layout, rank = self.layout(key, name), self._home
        if not layout.mesh:
            rank = self._plain_home
            layout = plain(layout.shape, rank)
            last = max(self.component.ranks)
            if replicated and last != rank:
                self._copies[key] = last
                self.paths.add(self.component.path(last))
        found = pieces(layout, rank, wanted)
        dtype = self._tensor(self.state, self._home, key, name).dtype
        self._wants[key] = _Want(name, layout, wanted, dtype, found)
        self.paths |= {self.component.path(piece.rank) for piece in found}

    def check(self) -> None:
        """Check that all wanted tensors are there, before any of them is copied.

        Raises:
            CorruptCheckpointError: a rank's file does not have its part.
            StateMismatchError: ranks differ where they must not.
        """
        for key, want in self._wants.items():
            parts = [(piece, self._part(piece.rank, key)) for piece in want.pieces]
            if key in self._copies:
                other = self._copy(key)
                for piece, part in parts:
                    self._compare(part[piece.source], other[piece.source], key)

    def read(self) -> dict[Key, torch.Tensor]:
        """All wanted tensors, as CPU tensors that own their memory.

        Raises:
            See `check`.
        """
        self.check()
        filled = {
            key: large_pages(torch.empty(local_shape(want.wanted), dtype=want.dtype))
            for key, want in self._wants.items()
        }
        self.fill(filled)
        return filled

    def fill(self, targets: Mapping[Key, torch.Tensor]) -> None:
        """Copy the wanted tensors, after `check`, into tensors of their shapes and dtypes, on any
        device. Then the files are closed."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        size = 0
        for key, target in targets.items():
            for piece in self._wants[key].pieces:
                copies.append((target[piece.target], self._part(piece.rank, key)[piece.source]))
                size += copies[-1][0].nbytes
            if size >= _AT_ONCE:
                _copy(copies)
                copies, size = [], 0
        _copy(copies)
        self._mapped.clear()

    def tensor(self, key: Key, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """One of what was wanted, as `read` returns it. Files that it opens stay mapped, but what
        was read of them does not stay in the memory of this process.

        Args:
            into: of the wanted shape and any dtype, is filled and returned.
        """
        want = self._wants[key]
        if key in self._copies or into is None:
            filled = torch.empty(local_shape(want.wanted), dtype=want.dtype)
        else:
            filled = into
        for piece in want.pieces:
            part = self._part(piece.rank, key)
            filled[piece.target].copy_(part[piece.source])
            forget_pages(part)
        if key in self._copies:
            other = self._copy(key)
            for piece in want.pieces:
                self._compare(filled[piece.target], other[piece.source], key)
        return filled if into is None or into is filled else into.copy_(filled)

    # -- inside -----------------------------------------------------------------------------

    def _open(self, rank: int) -> Any:
        if rank == self._home and hasattr(self, "state"):
            return self.state
        path = self._locate(self.component.path(rank))
        state = open_shard(path)
        if not isinstance(state, Mapping):
            raise CorruptCheckpointError(f"{path} holds a {type(state).__name__}, not a mapping")
        return state

    def _map(self, rank: int) -> Any:
        if rank not in self._mapped:
            self._mapped[rank] = self._open(rank)
        return self._mapped[rank]

    def _tensor(self, state: Any, rank: int, key: Key, name: str) -> torch.Tensor:
        try:
            value = reduce(lambda held, part: held[part], key, state)
        except (KeyError, IndexError, TypeError):
            value = None
        if not isinstance(value, torch.Tensor):
            raise CorruptCheckpointError(
                f"{self.component.path(rank)} has no tensor {name}, which "
                f"{self.component.path(self._home)} has"
            )
        return value

    def _part(self, rank: int, key: Key) -> torch.Tensor:
        """The rank's own part, after a check that it is as planned."""
        want = self._wants[key]
        tensor = self._tensor(self._map(rank), rank, key, want.name)
        local = local_of(tensor)
        coordinate = want.layout.coordinate(rank)
        expected = () if coordinate is None else local_shape(want.layout.held(coordinate))
        if (
            isinstance(tensor, DTensor) is not bool(want.layout.mesh)
            or local.shape != expected
            or local.dtype != want.dtype
        ):
            raise CorruptCheckpointError(
                f"{want.name} in {self.component.path(rank)} is {local.dtype} of shape "
                f"{tuple(local.shape)}; {self.component.path(self._home)} lets expect "
                f"{want.dtype} of shape {expected}"
            )
        return local

    def _copy(self, key: Key) -> torch.Tensor:
        """The last rank's copy of a tensor that all ranks must have alike."""
        want, rank = self._wants[key], self._copies[key]
        other = local_of(self._tensor(self._map(rank), rank, key, want.name))
        if other.shape != want.layout.shape:
            raise self._differs(key)
        return other

    def _compare(self, one: torch.Tensor, other: torch.Tensor, key: Key) -> None:
        if not same_bytes(one, other):
            raise self._differs(key)

    def _differs(self, key: Key) -> StateMismatchError:
        return StateMismatchError(
            f"{self._wants[key].name} is a plain tensor that differs between ranks of the "
            f"{self.component.world_size} that saved it "
            f"({self.component.path(self._copies[key])}); "
            "expected a DTensor (FSDP2's fully_shard), or the same on all ranks"
        )


def _copy(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Fill the first of each pair from the second, which is mapped from a file."""
    plain = []
    for target, source in copies:
        if target.device.type == "cpu" and target.is_contiguous() and source.is_contiguous():
            plain.append(Copy(target.data_ptr(), source.data_ptr(), target.nbytes))
        else:
            target.copy_(source)
    copy_all(plain, _THREADS)
    for _, source in copies:
        forget_pages(source)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same elements, bit for bit."""
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return bool(torch.equal(one, other))
