"""Read a rank's part of a component out of the shards of however many ranks saved it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.reshard.files import (
    AT_ONCE,
    Pair,
    ShardFiles,
    copy_memory,
    in_pieces,
)
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
)
from trainsync.dist.sharded import is_dtensor

Key = tuple[Any, ...]  # path into a state's nested mappings


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
        state: what the rank's counterpart among those that saved (`Component.home`) has, as
            `ShardFiles.open` gives it.

    Args:
        files: those of the step.
        rank, world_size: of those that load.
    """

    def __init__(
        self,
        files: ShardFiles,
        component: Component,
        rank: int,
        world_size: int,
    ) -> None:
        self.component = component
        self.same_ranks = component.world_size == world_size or component.one_for_all
        self._files = files
        self._home = component.home(rank, world_size)
        # A value that is not sharded is rank 0's on all ranks, unless each rank has its own again.
        self._plain_home = self._home if self.same_ranks else 0
        self.paths = {component.path(rank) for rank in (self._home, self._plain_home)}
        self.state = self._open(self._home)
        self._wants: dict[Key, _Want] = {}
        self._copies: dict[Key, int] = {}
        self._opened: dict[int, Any] = {}
        self._is_brought = False
        self._brought: dict[Key, torch.Tensor] | None = None

    def keeps(self, live: torch.Tensor) -> bool:
        """Whether ``live``, if it was a plain tensor when saved, may differ from rank to rank."""
        return self.same_ranks and not is_dtensor(live)

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

    def bring(self) -> Iterator[Pair]:
        """Copies to make of files that are not mapped, before `check`: by the caller, so that
        several components are read at once, or else by `check`.

        Raises:
            CorruptCheckpointError: a rank's file does not have its part.
        """
        for key, want in self._wants.items():
            for piece in want.pieces:
                self._part(piece.rank, key)
        self._is_brought = True
        if all(self._files.is_mapped(path) for path in self.paths):
            return iter(())
        self._brought = self._empty()
        return self._pairs(self._brought)

    def check(self) -> None:
        """Check that all wanted tensors are there, before any of them is copied.

        Of files that are not mapped they are read by then: after it nothing can fail any more.

        Raises:
            CorruptCheckpointError: a rank's file does not have its part, or differs.
            StateMismatchError: ranks differ where they must not.
            StoreError: the files are in a store, which cannot be read.
        """
        if not self._is_brought:
            self._files.copy(self.bring())
        self._compare_copies()

    def read(self) -> dict[Key, torch.Tensor]:
        """All wanted tensors, as CPU tensors that own their memory.

        Raises:
            See `check`.
        """
        self.check()
        if self._brought is not None:
            filled, self._brought = self._brought, None
        else:
            filled = self._empty()
            self._files.copy(self._pairs(filled))
        self._opened.clear()
        return filled

    def fill(self, targets: Mapping[Key, torch.Tensor]) -> None:
        """Copy the wanted tensors, after `check`, into tensors of their shapes and dtypes, on any
        device. Then the files are closed."""
        if self._brought is None:
            self._files.copy(self._pairs(targets))
        else:
            copy_memory([(target, self._brought[key]) for key, target in targets.items()])
            self._brought = None
        self._opened.clear()

    def real(self, value: Any) -> Any:
        """A part of `state`, with tensors that can be read as they are. Raises as `check`."""
        return self._files.real(self.component.path(self._home), value)

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
        path = self.component.path(rank)
        state = self._files.open(path)
        if not isinstance(state, Mapping):
            raise CorruptCheckpointError(f"{path} holds a {type(state).__name__}, not a mapping")
        return state

    def _state(self, rank: int) -> Any:
        if rank not in self._opened:
            self._opened[rank] = self._open(rank)
        return self._opened[rank]

    def _empty(self) -> dict[Key, torch.Tensor]:
        return {
            key: large_pages(torch.empty(local_shape(want.wanted), dtype=want.dtype, device="cpu"))
            for key, want in self._wants.items()
        }

    def _pairs(self, targets: Mapping[Key, torch.Tensor]) -> Iterator[Pair]:
        for key, target in targets.items():
            for piece in self._wants[key].pieces:
                source = self._part(piece.rank, key)[piece.source]
                yield self.component.path(piece.rank), target[piece.target], source

    def _compare_copies(self) -> None:
        """See that the last rank has the same, of what all ranks must have alike."""
        held: list[tuple[Key, torch.Tensor, torch.Tensor]] = []
        size = 0
        for key in self._copies:
            for _, one, other in in_pieces(self._pairs_of_copies(key)):
                held.append((key, one, other))
                size += other.nbytes
                if size >= AT_ONCE:
                    self._compare_all(held)
                    held, size = [], 0
        self._compare_all(held)

    def _pairs_of_copies(self, key: Key) -> Iterator[Pair]:
        other = self._copy(key)
        for piece in self._wants[key].pieces:
            if self._brought is None:
                one = self._part(piece.rank, key)[piece.source]
            else:
                one = self._brought[key][piece.target]
            yield self.component.path(piece.rank), one, other[piece.source]

    def _compare_all(self, held: list[tuple[Key, torch.Tensor, torch.Tensor]]) -> None:
        path = self.component.path(max(self.component.ranks))
        others = self._files.real(path, [other for _, _, other in held])
        for (key, one, _), other in zip(held, others, strict=True):
            self._compare(one, other, key)

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
        tensor = self._tensor(self._state(rank), rank, key, want.name)
        local = local_of(tensor)
        coordinate = want.layout.coordinate(rank)
        expected = () if coordinate is None else local_shape(want.layout.held(coordinate))
        if (
            is_dtensor(tensor) is not bool(want.layout.mesh)
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
        other = local_of(self._tensor(self._state(rank), rank, key, want.name))
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


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same elements, bit for bit."""
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return bool(torch.equal(one, other))
