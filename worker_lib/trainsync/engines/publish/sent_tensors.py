"""The weights of a sharded model in full, and as rank 0 sends them: large ones in parts."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainsync.checkpoint.errors import CheckpointError
from trainsync.dist.sharded import is_dtensor, is_fsdp1
from trainsync.engines.fsdp.state import fsdp_version, settle, without_wrappers
from trainsync.engines.lora.adapters import is_adapter
from trainsync.engines.lora.merging import has_adapter, merged_weights
from trainsync.engines.protocol import LoRAWeights, NamedTensor
from trainsync.weights.buckets.layout import StreamSchema, TensorMeta
from trainsync.weights.buckets.tensor_part import PART_BYTES, TensorPart, narrowed_parts, travels_as
from trainsync.weights.buckets.tensor_stream import Description, Value
from trainsync.weights.transports.base import meta_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def sent_tensors(
    module: torch.nn.Module,
    lora: LoRAWeights = LoRAWeights.ALL,
    narrow: torch.dtype | None = None,
    root: int = 0,
) -> Iterator[tuple[str, Value]]:
    """As `module_tensors` on the root; what the other ranks get is for nothing.

    A model that FSDP2 shards by rows gives tensors of more than `PART_BYTES` in parts; FSDP1
    gathers one wrapped module at a time.

    Args:
        narrow: what is wider travels as this dtype; see `travels_as`. Large tensors come in parts
            then.
        root: the rank that sends, as the default group numbers it.
    """
    buffers = PartBuffers()
    for name, tensor in _chosen(module, lora):
        if is_dtensor(tensor) and comes_in_parts(tensor):
            for part in parts_on_root(tensor, buffers, narrow, root):
                yield name, part
                del part  # it is the other side's now
        elif is_dtensor(tensor):
            yield name, full_tensor(tensor.to(travels_as(tensor.dtype, narrow)))
        else:
            yield from _narrowed(name, tensor, narrow)
        del tensor


def narrowed(
    tensors: Iterable[NamedTensor], narrow: torch.dtype | None
) -> Iterator[tuple[str, Value]]:
    """Full tensors that an engine gathers by itself, as `sent_tensors` gives a module's."""
    if narrow is None:
        yield from tensors
        return
    for name, tensor in tensors:
        yield from _narrowed(name, tensor, narrow)
        del tensor


def _narrowed(
    name: str, tensor: torch.Tensor, narrow: torch.dtype | None
) -> Iterator[tuple[str, Value]]:
    dtype = travels_as(tensor.dtype, narrow)
    if dtype == tensor.dtype:
        yield name, tensor.detach()
    elif tensor.numel() * dtype.itemsize <= PART_BYTES:
        yield name, tensor.detach().to(dtype)
    else:
        for part in narrowed_parts(tensor, dtype):
            yield name, part
            del part


def described(
    module: torch.nn.Module,
    lora: LoRAWeights = LoRAWeights.ALL,
    narrow: torch.dtype | None = None,
) -> Description | None:
    """The tensors of `sent_tensors` on the root, where a module shows them without a collective.

    None of FSDP1 and of merged LoRA weights.

    Args:
        narrow: as `sent_tensors` has it.
    """
    if fsdp_version(module) == 1 or (lora is LoRAWeights.MERGED and has_adapter(module)):
        return None
    tensors = list(_chosen(module, lora))
    if not tensors:
        return None
    metas = tuple(_sent_meta(name, tensor, narrow) for name, tensor in tensors)
    also = other_names(module, lora)
    return Description(StreamSchema(metas), _device_of(tensors[0][1]), also)


def _sent_meta(name: str, tensor: torch.Tensor, narrow: torch.dtype | None) -> TensorMeta:
    dtype = travels_as(tensor.dtype, narrow)
    own = meta_of(name, tensor)
    return replace(own, dtype=str(dtype).removeprefix("torch."), itemsize=dtype.itemsize)


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Where it is when it is gathered."""
    if not is_dtensor(tensor) or tensor.device.type == tensor.device_mesh.device_type:
        return tensor.device
    return torch.device(tensor.device_mesh.device_type, torch.accelerator.current_device_index())


def joined(values: Iterable[tuple[str, Value]]) -> Iterator[NamedTensor]:
    """The same weights, each in one tensor; what came in parts lies on the host."""
    whole = torch.empty(0)
    for name, value in values:
        if not isinstance(value, TensorPart):
            yield name, value
            continue
        if value.start == 0:
            whole = torch.empty(value.shape, dtype=value.data.dtype)
        stop = value.start + value.data.numel()
        whole.view(-1)[value.start : stop] = value.data
        if stop == whole.numel():
            yield name, whole
            whole = torch.empty(0)  # at most one is held


def module_tensors(module: torch.nn.Module, lora: LoRAWeights) -> Iterator[NamedTensor]:
    """Full tensors of a module's state dict; FSDP2 gathers one at a time, FSDP1 one wrapped module.

    A weight with several names (tied ones) comes once, under its first name. A collective: every
    rank iterates, to the end.

    Raises:
        CheckpointError: the adapter alone is wanted, and there is none.
        UnsupportedStateError: see `merged_weights`.
    """
    for name, tensor in _chosen(module, lora):
        yield name, full_tensor(tensor)
        del tensor  # at most one is held


def _chosen(module: torch.nn.Module, lora: LoRAWeights) -> Iterator[NamedTensor]:
    """As `module_tensors`, but what FSDP2 has sharded comes as it is, for `full_tensor`."""
    if lora is LoRAWeights.MERGED and has_adapter(module):
        yield from merged_weights(module)
        return
    weights = _of_fsdp1(module) if fsdp_version(module) == 1 else _of_state(module)
    none = True
    for name, tensor in weights:
        if lora is not LoRAWeights.ADAPTER or is_adapter(name):
            none = False
            yield name, tensor
        del tensor  # at most one is held
    if none and lora is LoRAWeights.ADAPTER:
        raise CheckpointError(
            "the adapter's weights alone are to be sent (lora='adapter'), but none of the model's "
            "weights belongs to an adapter"
        )


def _of_state(module: torch.nn.Module) -> Iterator[NamedTensor]:
    state = module.state_dict(keep_vars=True)
    settle(state)
    tensors = [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]
    yield from _first_names(tensors)


def _first_names(tensors: list[NamedTensor]) -> list[NamedTensor]:
    """Without those that came before under another name.

    By identity and not by address: where a rank's shard is empty it has none, and every rank must
    gather the same.
    """
    first: dict[int, NamedTensor] = {}
    for name, tensor in tensors:
        first.setdefault(id(tensor), (name, tensor))
    return list(first.values())


def other_names(module: torch.nn.Module, lora: LoRAWeights) -> dict[str, list[str]]:
    """The names of tied weights that are not sent, by the name that is; no collective.

    None of FSDP1's, whose shards do not show what is tied, and of merged ones, which come under
    every name.
    """
    if fsdp_version(module) == 1 or (lora is LoRAWeights.MERGED and has_adapter(module)):
        return {}
    state = module.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    return {first: others for first, *others in names.values() if others}


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's whole, on its mesh's device (a collective); any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor.detach()
    device = tensor.device_mesh.device_type
    # An offloaded shard has to be on the mesh's device to be gathered.
    shard: Any = tensor if tensor.device.type == device else tensor.to(device)
    whole: torch.Tensor = shard.full_tensor()
    return whole.detach()


def _of_fsdp1(module: torch.nn.Module) -> Iterator[NamedTensor]:
    for path, part in module.named_modules():
        if not is_fsdp1(part):
            continue
        with type(part).summon_full_params(part, recurse=False, writeback=False):
            for name, tensor in _first_names(list(_own_state(part, path))):
                # The module's memory goes when the context ends, and a tensor may be used longer.
                yield name, tensor.detach().clone()


def _own_state(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of a module, without those of nested FSDP modules."""
    stack = [(path, module)]
    while stack:
        prefix, current = stack.pop()
        for name, parameter in current.named_parameters(recurse=False):
            yield without_wrappers(f"{prefix}.{name}"), parameter
        for name, buffer in current.named_buffers(recurse=False):
            if name not in current._non_persistent_buffers_set:
                yield without_wrappers(f"{prefix}.{name}"), buffer
        children = [
            (f"{prefix}.{name}", child)
            for name, child in current.named_children()
            if not is_fsdp1(child)
        ]
        stack.extend(reversed(children))


class PartBuffers:
    """Memory of two parts, used in turn: what is made anew for each is scattered over the heaps of
    both threads, and took three times as much."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def next(self, size: int, device: torch.device) -> torch.Tensor:
        """The one that was given before the last, uint8 of shape (size,)."""
        if not self._buffers or self._buffers[0].device != device:
            self._buffers = [
                torch.empty(PART_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
            ]
        self._buffers.reverse()
        return self._buffers[0][:size]


def comes_in_parts(tensor: torch.Tensor) -> bool:
    """Whether `parts_on_root` takes it: FSDP2 sharded it by rows, and it is larger than a part.

    The same on every rank.
    """
    if not is_dtensor(tensor) or tensor.numel() * tensor.element_size() <= PART_BYTES:
        return False
    from torch.distributed.tensor import Replicate, Shard

    return sum(type(placement) is Shard for placement in tensor.placements) == 1 and all(
        isinstance(placement, Replicate) or (type(placement) is Shard and placement.dim == 0)
        for placement in tensor.placements
    )


def parts_on_root(
    tensor: "DTensor", buffers: PartBuffers, narrow: torch.dtype | None = None, root_rank: int = 0
) -> Iterator[TensorPart]:
    """The whole in order, on the root; nothing on the others.

    A collective of the ranks among which the tensor is sharded: each iterates to the end, and sends
    the root what it has of the part. What the root has itself aliases its shard.

    Args:
        buffers: for the parts. A part is valid while the next one is made, and no longer.
        narrow: what is wider travels as this dtype, also between the ranks; see `travels_as`.
        root_rank: the rank that gets the parts, as the default group numbers it.
    """
    from torch.distributed.tensor import Shard

    dim = next(i for i, placement in enumerate(tensor.placements) if type(placement) is Shard)
    mesh = tensor.device_mesh
    group = mesh.get_group(dim)
    ranks = dist.get_process_group_ranks(group)
    if root_rank not in ranks:
        return  # this is another replica of the shards
    root, own = ranks.index(root_rank), mesh.get_local_rank(dim)
    bounds = _bounds(tensor.shape, len(ranks))
    shard = tensor.to_local().detach().contiguous().reshape(-1)
    dtype = travels_as(tensor.dtype, narrow)
    step = PART_BYTES // dtype.itemsize
    for start in range(0, tensor.numel(), step):
        stop = min(start + step, tensor.numel())
        ranges = [_overlap(start, stop, *owned) for owned in bounds]
        first, last = (at - bounds[own][0] for at in ranges[own])
        part = shard[first:last].to(dtype)
        if ranges[root] != (start, stop):
            sizes = [b - a for a, b in ranges]
            part = _to_root(part.to(mesh.device_type), sizes, root, own, group, buffers)
        if own == root:
            yield TensorPart(tuple(tensor.shape), start, part)


def _bounds(shape: torch.Size, count: int) -> list[tuple[int, int]]:
    """The first element and the last one's successor of each rank's rows."""
    rows = -(-shape[0] // count)
    width = shape[1:].numel()
    stops = [min(n * rows, shape[0]) * width for n in range(count + 1)]
    return list(itertools.pairwise(stops))


def _overlap(start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """The intersection of two ranges; (low, low) when it is empty."""
    first, last = max(start, low), min(stop, high)
    return (first, last) if first < last else (low, low)


def _to_root(
    part: torch.Tensor,
    sizes: list[int],
    root: int,
    own: int,
    group: Any,
    buffers: PartBuffers,
) -> torch.Tensor:
    """``sizes`` elements of each rank, one after the other, on ``root``; nothing on the others."""
    nothing = [0] * len(sizes)
    width = part.element_size()
    gives, takes = nothing.copy(), nothing
    gives[root] = sizes[own] * width
    if own == root:
        takes = [size * width for size in sizes]
        whole = buffers.next(sum(takes), part.device)
    else:
        whole = part.new_empty(0, dtype=torch.uint8)
    # One collective of the whole group: pairs would each take buffers of NCCL's own.
    dist.all_to_all_single(whole, part.view(torch.uint8), takes, gives, group=group)
    return whole.view(part.dtype)
