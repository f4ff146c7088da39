"""The weights of a training engine as rank 0 sends them: no large one whole, if that can be."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainsync.engines.adapt import adapt
from trainsync.engines.fsdp.state import fsdp_version
from trainsync.engines.lora.merging import has_adapter
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.protocol import LoRAWeights, NamedTensor
from trainsync.engines.publish.full_tensors import chosen_tensors, full_tensor, other_names
from trainsync.engines.publish.sharded_parts import PartBuffers, comes_in_parts, parts_on_root
from trainsync.weights.buckets.layout import StreamSchema, TensorMeta
from trainsync.weights.buckets.narrowing import narrowed_parts, travels_as
from trainsync.weights.buckets.tensor_part import PART_BYTES, TensorPart
from trainsync.weights.buckets.tensor_stream import Description, Value
from trainsync.weights.transports.base import meta_of


def sent_tensors(
    engine: Any, narrow: torch.dtype | None = None, root: int = 0
) -> Iterator[tuple[str, Value]]:
    """As `full_tensors` on the root; what the other ranks get is for nothing.

    A model that FSDP2 shards by rows gives tensors of more than `PART_BYTES` in parts. verl's
    engines gather whole tensors by themselves; FSDP1 gathers one wrapped module at a time.

    Args:
        engine: see `adapt`.
        narrow: what is wider travels as this dtype; see `travels_as`. Large tensors come in parts
            then.
        root: the rank that sends, as the default group numbers it.
    """
    trained, buffers = adapt(engine), PartBuffers()
    if not isinstance(trained, TrainedModule):
        if narrow is None:
            yield from trained.get_per_tensor_param()
            return
        for name, tensor in trained.get_per_tensor_param():
            yield from _narrowed(name, tensor, narrow)
            del tensor
        return
    for name, tensor in chosen_tensors(trained.module, trained.lora):
        if isinstance(tensor, DTensor) and comes_in_parts(tensor):
            for part in parts_on_root(tensor, buffers, narrow, root):
                yield name, part
                del part  # it is the other side's now
        elif isinstance(tensor, DTensor):
            yield name, full_tensor(tensor.to(travels_as(tensor.dtype, narrow)))
        else:
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


def described(engine: Any, narrow: torch.dtype | None = None) -> Description | None:
    """What `sent_tensors` gives on the root, where a module shows it without a collective.

    None of FSDP1, of merged LoRA weights and of verl's engines.

    Args:
        engine: see `adapt`.
        narrow: as `sent_tensors` has it.
    """
    trained = adapt(engine)
    if not isinstance(trained, TrainedModule) or fsdp_version(trained.module) == 1:
        return None
    if trained.lora is LoRAWeights.MERGED and has_adapter(trained.module):
        return None
    tensors = list(chosen_tensors(trained.module, trained.lora))
    if not tensors:
        return None
    metas = tuple(_sent_meta(name, tensor, narrow) for name, tensor in tensors)
    also = other_names(trained.module, trained.lora)
    return Description(StreamSchema(metas), _device_of(tensors[0][1]), also)


def _sent_meta(name: str, tensor: torch.Tensor, narrow: torch.dtype | None) -> TensorMeta:
    dtype = travels_as(tensor.dtype, narrow)
    own = meta_of(name, tensor)
    return replace(own, dtype=str(dtype).removeprefix("torch."), itemsize=dtype.itemsize)


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Where it is when it is gathered."""
    if not isinstance(tensor, DTensor) or tensor.device.type == tensor.device_mesh.device_type:
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
