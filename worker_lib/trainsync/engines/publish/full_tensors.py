"""Every weight of a sharded model in full, one after the other, as explorers take them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trainsync.checkpoint.errors import CheckpointError
from trainsync.engines.fsdp.state import fsdp_version, settle, without_wrappers
from trainsync.engines.lora.adapters import is_adapter
from trainsync.engines.lora.merging import has_adapter, merged_weights
from trainsync.engines.protocol import LoRAWeights, NamedTensor


def module_tensors(module: torch.nn.Module, lora: LoRAWeights) -> Iterator[NamedTensor]:
    """Full tensors of a module's state dict; FSDP2 gathers one at a time, FSDP1 one wrapped module.

    A weight with several names (tied ones) comes once, under its first name. A collective: every
    rank iterates, to the end.

    Raises:
        CheckpointError: the adapter alone is wanted, and there is none.
        UnsupportedStateError: see `merged_weights`.
    """
    for name, tensor in chosen_tensors(module, lora):
        yield name, full_tensor(tensor)
        del tensor  # at most one is held


def chosen_tensors(module: torch.nn.Module, lora: LoRAWeights) -> Iterator[NamedTensor]:
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
    """Of weights with several names those that do not come, by the one that does; no collective.

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
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    device = tensor.device_mesh.device_type
    # An offloaded shard has to be on the mesh's device to be gathered.
    shard: Any = tensor if tensor.device.type == device else tensor.to(device)
    whole: torch.Tensor = shard.full_tensor()
    return whole.detach()


def _of_fsdp1(module: torch.nn.Module) -> Iterator[NamedTensor]:
    for path, part in module.named_modules():
        if not isinstance(part, FullyShardedDataParallel):
            continue
        with FullyShardedDataParallel.summon_full_params(part, recurse=False, writeback=False):
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
            if not isinstance(child, FullyShardedDataParallel)
        ]
        stack.extend(reversed(children))
