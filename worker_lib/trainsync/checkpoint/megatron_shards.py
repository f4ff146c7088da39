"""The weights of a Megatron model on disk: boxes of global tensors, held by any rank.

Every rank writes one shard file that `torch.load(weights_only=True)` reads. It holds the rank's
*boxes*: a global tensor's name in Megatron's ``sharded_state_dict``, where in it the box begins,
and its data. Nothing of the parallel layout has to be known to read them: any box of a global
tensor, and so any other layout, is put together from those that overlap it. Needs no Megatron.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.reshard.files import Pair
from trainsync.checkpoint.load.reshard.shard_files import Component, forget_pages, large_pages

FORMAT: Final = "trainsync.megatron.1"

WantedBox = tuple[str, Sequence[int], Sequence[int]]
"""Key of a global tensor, start and size of a box in it, with the leading dimensions."""


class NotAllSavedError(CorruptCheckpointError):
    """The open files do not hold all of a box."""


@dataclass(frozen=True)
class Box:
    """A rank's part of a global tensor.

    Attributes:
        key: name of the global tensor.
        shape: of the global tensor. Its first ``leading`` dimensions are not those of weights:
            Megatron lays the same weight of all layers, and of all experts, side by side.
        start: index of the box's first element in the global tensor.
        leading: how many dimensions ``data`` has less than the global tensor.
        padded: whether the first dimension is filled up, by how much depends on the layout.
        data: the elements; the box is one index wide in the leading dimensions.
    """

    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    leading: int
    padded: bool
    data: torch.Tensor

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the box in the global tensor."""
        return (1,) * self.leading + tuple(self.data.shape)


def pack(
    boxes: Sequence[Box], layout: Mapping[str, int], beside: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of a rank's shard file.

    Args:
        layout: sizes of the parallel dimensions and the rank's coordinates, for messages.
        beside: what the rank holds that is no part of a global tensor.
    """
    held = [vars(box) for box in boxes]
    return {"format": FORMAT, "layout": dict(layout), "boxes": held, "beside": dict(beside or {})}


def is_megatron(state: Any) -> bool:
    """Whether the content of a shard file is that of `pack`."""
    return isinstance(state, Mapping) and state.get("format") == FORMAT


@dataclass
class GlobalTensor:
    """One tensor of the whole model, and where its boxes lie."""

    key: str
    shape: tuple[int, ...]
    leading: int
    padded: bool
    dtype: torch.dtype
    boxes: list[tuple[int, Box]] = field(default_factory=list)  # (rank, box)
    near: dict[tuple[int, ...], list[tuple[int, Box]]] = field(default_factory=dict)
    """The same at each index of the leading dimensions."""

    def nearest(self, start: Sequence[int]) -> Sequence[tuple[int, Box]]:
        """The boxes at the leading dimensions of a box that begins at ``start``."""
        return self.near.get(tuple(start[: self.leading]), ())


class MegatronShards:
    """Shard files of a step's weights; what is not read of them costs no memory.

    Of files that are not mapped (see `ShardFiles`) `read` gives what `fetch` has brought.

    Attributes:
        tensors: of the whole model, by key.
        layout: of the first rank whose file is open.
        beside: what each rank saved besides, by rank; see `pack`.

    Args:
        opens: gives the state in a file, by its path relative to the step's directory.
        ranks: those whose files are opened; None: all that saved.

    Raises:
        CorruptCheckpointError: a file is missing, or the files contradict each other.
        What ``opens`` raises.
    """

    def __init__(
        self,
        opens: Callable[[str], Any],
        component: Component,
        ranks: Iterable[int] | None = None,
    ) -> None:
        component.home(0, 1)  # refuses a missing file
        self.tensors: dict[str, GlobalTensor] = {}
        self.layout: dict[str, int] = {}
        self.beside: dict[int, Mapping[str, Any]] = {}
        self._component = component
        self._is_mapped = True
        self._fetched: dict[WantedBox, torch.Tensor] = {}
        for rank in sorted(component.ranks if ranks is None else ranks):
            path = component.path(rank)
            state = opens(path)
            if not is_megatron(state):
                raise CorruptCheckpointError(f"{path} is not the shard of a Megatron model")
            try:
                self.layout = self.layout or dict(state["layout"])
                self.beside[rank] = state.get("beside", {})  # older files have none
                for held in state["boxes"]:
                    self._add(rank, path, Box(**held))
            except (KeyError, TypeError) as error:
                raise CorruptCheckpointError(f"{path} cannot be understood: {error}") from error

    def _add(self, rank: int, path: str, box: Box) -> None:
        known = self.tensors.setdefault(
            box.key, GlobalTensor(box.key, box.shape, box.leading, box.padded, box.data.dtype)
        )
        given = (box.shape, box.leading, box.data.dtype)
        if given != (known.shape, known.leading, known.dtype):
            raise CorruptCheckpointError(
                f"{box.key} in {path} is {box.data.dtype} of shape {box.shape}; another rank's is "
                f"{known.dtype} of shape {known.shape}"
            )
        near = known.near.setdefault(box.start[: box.leading], [])
        if any(_overlap(other, box.start, box.size) for _, other in near):
            raise CorruptCheckpointError(
                f"{box.key}: the part in {path} that begins at {box.start} was saved by another "
                "rank too, or twice; expected each element once"
            )
        near.append((rank, box))
        known.boxes.append((rank, box))
        self._is_mapped &= not box.data.is_meta

    def paths(self, key: str) -> set[str]:
        """Files that hold a part of the tensor, relative to the step's directory."""
        return {self._component.path(rank) for rank, _ in self.tensors[key].boxes}

    def paths_of(self, key: str, start: Sequence[int], size: Sequence[int]) -> set[str]:
        """Files that hold a part of a box; as `paths`. See `read` for the arguments.

        Raises:
            NotAllSavedError: not all of the box was saved.
        """
        return {self.path(part.rank) for part in self._parts(key, start, size)}

    def path(self, rank: int) -> str:
        """The file that a rank saved, relative to the step's directory."""
        return self._component.path(rank)

    def fetch(self, wanted: Iterable[WantedBox], copy: Callable[[Iterable[Pair]], None]) -> None:
        """Bring boxes that `read` is asked for later into memory, where files are not mapped.

        Args:
            copy: `ShardFiles.copy` of the files, called once.

        Raises:
            NotAllSavedError: not all of a box was saved. What ``copy`` raises.
        """
        if self._is_mapped:
            return
        made: dict[WantedBox, torch.Tensor] = {}
        pairs: list[Pair] = []
        for key, start, size in wanted:
            place = key, tuple(start), tuple(size)
            parts = self._parts(key, start, size)
            if place in made or not any(part.data.is_meta for part in parts):
                continue
            made[place] = self._empty(key, size)
            pairs += ((self.path(p.rank), made[place][p.target], p.data) for p in parts)
        copy(pairs)
        self._fetched |= made

    def read(self, key: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """A box of a global tensor, without its leading dimensions, on the CPU.

        It may be mapped from a file, and must not be changed.

        Args:
            size: one in the leading dimensions. Beyond the end of a padded tensor there are zeros.

        Raises:
            NotAllSavedError: no rank saved a part of it.
        """
        fetched = self._fetched.get((key, tuple(start), tuple(size)))
        if fetched is not None:
            return fetched
        for _, box in self.tensors[key].nearest(start):
            if box.start == tuple(start) and box.size == tuple(size):
                assert not box.data.is_meta, "fetch comes first"
                return box.data
        parts = self._parts(key, start, size)
        whole = self._empty(key, size)
        for part in parts:
            whole[part.target].copy_(part.data)
        return whole

    def _empty(self, key: str, size: Sequence[int]) -> torch.Tensor:
        tensor = self.tensors[key]
        shape = tuple(size)[tensor.leading :]
        if tensor.padded:
            return torch.zeros(shape, dtype=tensor.dtype, device="cpu")
        return large_pages(torch.empty(shape, dtype=tensor.dtype, device="cpu"))

    def _parts(self, key: str, start: Sequence[int], size: Sequence[int]) -> "list[_Part]":
        """The ranks' parts of a box. Raises `NotAllSavedError`."""
        tensor = self.tensors[key]
        parts, filled = [], 0
        for rank, box in tensor.nearest(start):
            found = _overlap(box, start, size)
            if found is not None:
                source, target, count = found
                data = box.data[source[tensor.leading :]]
                parts.append(_Part(rank, data, target[tensor.leading :]))
                filled += count
        inside = [
            max(0, min(begin + length, end) - begin)
            for begin, length, end in zip(start, size, tensor.shape, strict=True)
        ]
        # Ranks of a larger layout may have nothing but what fills a padded tensor up.
        beyond = tensor.padded and start[0] >= tensor.shape[0]
        if filled != math.prod(inside) or (filled == 0 and not beyond):
            raise NotAllSavedError(
                f"{tensor.key}: of the part that begins at {tuple(start)} and is {tuple(size)} "
                f"large, {filled} of {math.prod(inside)} elements were saved"
            )
        return parts

    def whole(self, key: str, index: tuple[int, ...]) -> torch.Tensor:
        """One layer's (and expert's) weight: everything at ``index`` of the leading dimensions."""
        return self.read(*self.whole_box(key, index))

    def whole_box(self, key: str, index: tuple[int, ...]) -> WantedBox:
        """The box that `whole` reads."""
        tensor = self.tensors[key]
        rest = tensor.shape[tensor.leading :]
        return key, (*index, *(0 for _ in rest)), (*(1 for _ in index), *rest)

    def forget_pages(self, key: str, index: tuple[int, ...]) -> None:
        """Take what `whole` read out of this process's memory."""
        if not self._is_mapped:
            self._fetched.pop(self.whole_box(key, index), None)
            return
        for _, box in self.tensors[key].near.get(index, ()):
            forget_pages(box.data)

    def describe(self) -> str:
        """The layout of the ranks that saved, for people."""
        return describe(self.layout)


def describe(layout: Mapping[str, int]) -> str:
    """Sizes of the parallel dimensions, for people."""
    return " ".join(f"{name}={layout.get(name, 1)}" for name in ("tp", "pp", "ep", "cp", "dp"))


def require(shards: MegatronShards, key: str, shape: tuple[int, ...], layout: str) -> None:
    """See that a live tensor of that global shape can be filled.

    Args:
        layout: of the ranks that load, for the message.

    Raises:
        StateMismatchError: names both layouts.
    """
    tensor = shards.tensors.get(key)
    if tensor is None:
        raise StateMismatchError(
            f"the checkpoint has no {key}: it was saved by {shards.describe()} and is loaded by "
            f"{layout}; it has {', '.join(sorted(shards.tensors)[:3])} …"
        )
    same = tensor.shape[1:] == shape[1:] if tensor.padded else tensor.shape == shape
    if not same:
        raise StateMismatchError(
            f"{key} was saved with shape {tensor.shape} by {shards.describe()} and has shape "
            f"{shape} in {layout}; expected the same model"
        )


_Slices = tuple[slice, ...]


@dataclass(frozen=True)
class _Part:
    """A rank's part of a box: its elements, and where in the box they belong."""

    rank: int
    data: torch.Tensor
    target: _Slices


def _overlap(
    box: Box, start: Sequence[int], size: Sequence[int]
) -> tuple[_Slices, _Slices, int] | None:
    """(where in the box, where in what is wanted, how many elements); None for nothing."""
    source, target, count = [], [], 1
    for held, length, begin, wanted in zip(box.start, box.size, start, size, strict=True):
        low, high = max(held, begin), min(held + length, begin + wanted)
        if low >= high:
            return None
        source.append(slice(low - held, high - held))
        target.append(slice(low - begin, high - begin))
        count *= high - low
    return tuple(source), tuple(target), count
