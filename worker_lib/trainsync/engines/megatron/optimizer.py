"""State of a rank's Megatron optimizer as boxes of global tensors, like the weights.

Megatron's distributed optimizer gives each data parallel rank a flat piece of a buffer that all
weights lie in. Its own ``sharded_state_dict`` of such pieces either belongs to one tensor and
pipeline parallel layout (``dp_reshardable``), gathers them on one rank (``fully_reshardable``), or
is refused by Megatron (``fully_sharded_model_space``). This module instead maps each piece to the
model's ``sharded_state_dict`` by the memory address of its weight. The mapping reads private names
of Megatron's optimizer, so the version of megatron-core is pinned.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.megatron_shards import Box
from trainsync.engines.megatron.state import live_tensors

PREFIX: Final = "optimizer.state."
"""Prefix of the global tensors' names; the state's and the weight's names in Megatron follow."""

_PARAM, _FP32_PARAM, _STEP = "param", "fp32_param", "step"


@dataclass(frozen=True)
class Region:
    """A box of a weight's global tensor, and where its elements are in the optimizer's flat piece.

    Attributes:
        tensor: Megatron's ``ShardedTensor`` of the weight.
        start: the box's start in the global tensor, with the leading dimensions.
        shape: the box's shape, without the leading dimensions.
        offset: index in the piece of the box's first element.
    """

    tensor: Any
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> tuple[int, ...]:
        """The box's shape, with the leading dimensions."""
        leading: int = self.tensor.prepend_axis_num
        return (1,) * leading + self.shape

    @property
    def elements(self) -> slice:
        """The slice of the piece with the box's elements."""
        return slice(self.offset, self.offset + math.prod(self.shape))


@dataclass(frozen=True)
class OptimizerShard:
    """The part of one weight's state that this rank's optimizer has.

    Attributes:
        optimizer: Megatron's DistributedOptimizer.
        parameter: the model's parameter.
        length: number of elements.
        regions: the boxes that together make up the piece.
    """

    optimizer: Any
    parameter: torch.nn.Parameter
    length: int
    regions: tuple[Region, ...]

    def state(self) -> dict[str, torch.Tensor]:
        """Flat tensors of ``length`` elements, by name; they alias the optimizer's state."""
        held = dict(self.optimizer._get_main_param_and_optimizer_states(self.parameter))
        held.pop(_STEP, None)  # saved with the parameter groups
        held[_FP32_PARAM] = held.pop(_PARAM)
        return {name: tensor.detach() for name, tensor in held.items()}

    def fill(self, state: Mapping[str, torch.Tensor], step: float | None) -> None:
        """Copy into the optimizer's state, in place.

        Args:
            state: as returned by `state`.
            step: for torch's optimizers, which count steps for each weight; None for others.
        """
        given = dict(state)
        given[_PARAM] = given.pop(_FP32_PARAM)
        if step is not None:
            given[_STEP] = torch.tensor(step)
        self.optimizer._set_main_param_and_optimizer_states(self.parameter, given)

    def main_weight(self) -> torch.Tensor:
        """The inner optimizer's tensor for this weight, by which its state is keyed."""
        group, place = self.optimizer.model_param_group_index_map[self.parameter]
        weight: torch.Tensor = self.optimizer.optimizer.param_groups[group]["params"][place]
        return weight

    def is_first(self) -> bool:
        """Whether no tensor or pipeline parallel rank has a copy before this one's."""
        from megatron.core.dist_checkpointing.mapping import is_main_replica

        instance = self.optimizer.distributed_optimizer_instance_id
        # The last number is the data parallel rank, which holds another piece and not a copy.
        return all(
            is_main_replica((*region.tensor.replica_id[:-1], instance)) for region in self.regions
        )


def distributed_optimizers(optimizer: Any) -> list[Any] | None:
    """The distributed optimizers inside ``optimizer``; None if it contains any other kind."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(part, DistributedOptimizer):
            return None
        if part.is_stub_optimizer:  # this rank trains no weight
            continue
        if part.ddp_config.use_megatron_fsdp or isinstance(part.optimizer, HybridDeviceOptimizer):
            return None
        found.append(part)
    return found


def pieces(optimizers: Sequence[Any], chunks: Sequence[torch.nn.Module]) -> list[OptimizerShard]:
    """The pieces of this rank's optimizers, in the optimizers' order.

    Args:
        optimizers: from `distributed_optimizers`.
        chunks: a model for each virtual pipeline stage, without wrappers, on their device.

    Raises:
        UnsupportedStateError: a trained weight is not in the model's sharded state.
    """
    places = _Places(chunks)
    return [
        OptimizerShard(
            optimizer, parameter, end - start, tuple(places.regions(parameter, start, end))
        )
        for optimizer in optimizers
        for parameter, start, end in _ranges(optimizer)
    ]


def own_boxes(held: Sequence[OptimizerShard]) -> list[Box]:
    """The boxes of its pieces that this rank saves; the data aliases the optimizer's state."""
    return [
        Box(
            f"{PREFIX}{name}.{region.tensor.key}",
            tuple(region.tensor.global_shape),
            region.start,
            region.tensor.prepend_axis_num,
            region.tensor.allow_shape_mismatch,
            flat[region.elements].view(region.shape),
        )
        for piece in held
        if piece.is_first()
        for name, flat in piece.state().items()
        for region in piece.regions
    ]


def flat_boxes(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, size) of the boxes that cover elements ``begin`` to ``end`` of a contiguous tensor,
    in memory order; pure. At most two boxes for each dimension but the last, plus one."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    inner = math.prod(shape[1:])
    row = begin // inner
    if begin % inner or end - begin < inner:
        stop = min(end, (row + 1) * inner)
        for start, size in flat_boxes(shape[1:], begin - row * inner, stop - row * inner):
            yield (row, *start), (1, *size)
        begin = stop
        row += 1
    rows = (end - begin) // inner
    if rows > 0:
        yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
        begin += rows * inner
    yield from flat_boxes(shape, begin, end)


def _ranges(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    for parameter in optimizer.model_param_gbuf_map:
        place = optimizer._get_model_param_range_map(parameter)[_PARAM]
        yield parameter, place.start, place.end


class _Places:
    """Maps memory addresses to parts of global tensors."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        known: dict[int, Any] = {}
        for tensor in live_tensors(chunks):
            if tensor.data.numel():
                known.setdefault(tensor.data.data_ptr(), tensor)
        self._addresses = sorted(known)
        self._tensors = [known[address] for address in self._addresses]

    def regions(self, parameter: torch.nn.Parameter, start: int, end: int) -> Iterator[Region]:
        """Regions of elements ``start`` to ``end`` of a parameter. Raises
        `UnsupportedStateError`."""
        width = parameter.element_size()
        first = parameter.data_ptr() + start * width
        last = parameter.data_ptr() + end * width
        at = first
        number = max(0, bisect.bisect_right(self._addresses, first) - 1)
        while at < last:
            tensor = self._tensors[number] if number < len(self._tensors) else None
            begins = self._addresses[number] if tensor is not None else last
            ends = begins if tensor is None else begins + tensor.data.nbytes
            if tensor is None or not begins <= at < ends or not tensor.data.is_contiguous():
                raise UnsupportedStateError(
                    f"a trained weight of shape {tuple(parameter.shape)} is not where Megatron's "
                    "sharded_state_dict has it, or lies in strides there; expected modules whose "
                    "sharded_state_dict gives the parameters themselves"
                )
            stop = min(last, ends)
            offset = (at - first) // width
            inside = (at - begins) // width, (stop - begins) // width
            for index, shape in flat_boxes(tuple(tensor.data.shape), *inside):
                yield Region(tensor, _moved(tensor, index), shape, offset)
                offset += math.prod(shape)
            at = stop
            number += 1


def _moved(tensor: Any, index: tuple[int, ...]) -> tuple[int, ...]:
    leading = tensor.prepend_axis_num
    offset = tuple(tensor.global_offset)
    return offset[:leading] + tuple(a + b for a, b in zip(offset[leading:], index, strict=True))
