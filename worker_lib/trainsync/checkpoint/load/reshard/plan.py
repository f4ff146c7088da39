"""Plans the parts of each rank's shard to read when another number of ranks loads. Pure arithmetic.

A shard is described, for each dimension of the tensor, by the *spans* of the whole tensor's
indices that it holds, in the order in which it holds them. One span a dimension is the usual case;
FSDP over tensor parallelism deals rows out in several.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

Spans = tuple[tuple[int, int], ...]  # (start, length) of each, lengths > 0
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Split:
    """A mesh dimension splits dimension ``dim`` of the tensor, as ``torch.chunk`` does.

    With ``groups`` > 1 the tensor is first cut into so many chunks, and each of them is split:
    torch's ``_StridedShard`` with that ``split_factor``.
    """

    dim: int
    groups: int = 1


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor on a mesh of ranks; a plain tensor lies on a mesh without dimensions.

    Attributes:
        shape: of the whole tensor.
        mesh: size of each mesh dimension.
        ranks: of the mesh, row by row.
        splits: for each mesh dimension what it splits; None where it holds copies.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    splits: tuple[Split | None, ...]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Coordinate of ``rank`` on the mesh; None when it is not part of it."""
        if rank not in self.ranks:
            return None
        index, found = self.ranks.index(rank), []
        for size in reversed(self.mesh):
            index, position = divmod(index, size)
            found.append(position)
        return tuple(reversed(found))

    def rank(self, coordinate: Sequence[int]) -> int:
        """At a coordinate of the mesh."""
        index = 0
        for size, position in zip(self.mesh, coordinate, strict=True):
            index = index * size + position
        return self.ranks[index]

    def held(self, coordinate: tuple[int, ...]) -> tuple[Spans, ...]:
        """The spans that the rank there holds, for each dimension of the tensor."""
        return _held(self.shape, self.mesh, self.splits, coordinate)


def plain(shape: Sequence[int], rank: int) -> Layout:
    """The layout of a whole tensor on one rank."""
    return Layout(tuple(shape), (), (rank,), ())


def local_shape(held: Sequence[Spans]) -> tuple[int, ...]:
    """Shape of a shard that holds ``held``."""
    return tuple(sum(length for _, length in spans) for spans in held)


@dataclass(frozen=True)
class BoxCopy:
    """A box of ``rank``'s shard, and the box of equal shape of the wanted shard that it fills."""

    rank: int
    source: Box
    target: Box


@lru_cache(maxsize=4096)  # most tensors of a model lie as others do
def pieces(layout: Layout, home: int, wanted: tuple[Spans, ...]) -> tuple[BoxCopy, ...]:
    """The boxes that fill ``wanted``, each element once.

    Args:
        layout: of the tensor as it was saved.
        home: of several copies the one on this rank's side of the mesh is taken; any rank will do.
        wanted: of the same tensor, in the order of the shard that is to be filled.
    """
    if math.prod(local_shape(wanted)) == 0:
        return ()
    near = layout.coordinate(home) or (0,) * len(layout.mesh)
    choices = [
        range(size) if split is not None else (position,)
        for size, split, position in zip(layout.mesh, layout.splits, near, strict=True)
    ]
    found: list[BoxCopy] = []
    for coordinate in product(*choices):
        held = layout.held(coordinate)
        overlaps = [list(_overlaps(has, wants)) for has, wants in zip(held, wanted, strict=True)]
        rank = layout.rank(coordinate)
        found += [
            BoxCopy(
                rank,
                tuple(slice(source, source + length) for source, _, length in box),
                tuple(slice(target, target + length) for _, target, length in box),
            )
            for box in product(*overlaps)
        ]
    return tuple(found)


@lru_cache(maxsize=65536)
def _held(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    splits: tuple[Split | None, ...],
    coordinate: tuple[int, ...],
) -> tuple[Spans, ...]:
    held: list[Spans] = [((0, length),) if length else () for length in shape]
    for size, split, position in zip(mesh, splits, coordinate, strict=True):
        if split is None:
            continue
        parts: Spans = ()
        for group in range(split.groups):
            parts += _chunk(_chunk(held[split.dim], split.groups, group), size, position)
        held[split.dim] = parts
    return tuple(held)


def _chunk(spans: Spans, parts: int, index: int) -> Spans:
    """The ``index``-th of ``parts`` chunks: all are ⌈n/parts⌉ long, but the last ones."""
    total = sum(length for _, length in spans)
    size = -(-total // parts)
    first, last = min(index * size, total), min((index + 1) * size, total)
    taken, before = [], 0
    for start, length in spans:
        low, high = max(first - before, 0), min(last - before, length)
        if low < high:
            taken.append((start + low, high - low))
        before += length
    return tuple(taken)


def _overlaps(has: Spans, wants: Spans) -> Iterator[tuple[int, int, int]]:
    """(index in the one shard, index in the other, length) of what both hold."""
    source = 0
    for start, length in has:
        target = 0
        for other, other_length in wants:
            low, high = max(start, other), min(start + length, other + other_length)
            if low < high:
                yield source + low - start, target + low - other, high - low
            target += other_length
        source += length
