"""Every weight of a sharded model in full, one after the other, as explorers take them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trainsync.engines.fsdp_state import fsdp_version, settle

NamedTensor = tuple[str, torch.Tensor]

# What wrappers put into the names of FSDP1's modules.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def full_tensors(engine: Any) -> Iterator[NamedTensor]:
    """Names and full tensors of the engine's weights, the same on every rank and in every call.

    A collective: every rank iterates, to the end. What an engine of verl gives by
    ``get_per_tensor_param`` is taken as it is; with a LoRA adapter that is not merged, the base
    model's weights come first and the adapter's after them. Of any other engine it is the state
    dict of ``engine.module``: FSDP2 gathers one tensor at a time, FSDP1 one wrapped module, and a
    weight with several names (tied ones) comes once, under its first name.

    A tensor may alias the parameter where nothing had to be gathered; others are fresh.
    """
    if hasattr(engine, "get_per_tensor_param"):
        yield from _of_verl(engine)
    elif fsdp_version(engine.module) == 1:
        yield from _of_fsdp1(engine.module)
    else:
        yield from _of_state(engine.module)


def _of_verl(engine: Any) -> Iterator[NamedTensor]:
    weights, adapter = engine.get_per_tensor_param()
    yield from weights
    if adapter is not None:
        # What came is the base model alone; this is how verl asks for the rest.
        weights, _ = engine.get_per_tensor_param(base_sync_done=True)
        yield from weights


def _of_state(module: torch.nn.Module) -> Iterator[NamedTensor]:
    state = module.state_dict(keep_vars=True)
    settle(state)
    tensors = [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]
    for name, tensor in _first_names(tensors):
        yield name, _full(tensor)


def _first_names(tensors: list[NamedTensor]) -> list[NamedTensor]:
    """Without those that came before under another name.

    By identity and not by address: where a rank's shard is empty it has none, and every rank must
    gather the same.
    """
    first: dict[int, NamedTensor] = {}
    for name, tensor in tensors:
        first.setdefault(id(tensor), (name, tensor))
    return list(first.values())


def _full(tensor: torch.Tensor) -> torch.Tensor:
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
            # Its memory goes when the context ends, and a tensor may be used longer.
            own = [
                (name, tensor.detach().clone())
                for name, tensor in _first_names(list(_own_state(part, path)))
            ]
        while own:
            yield own.pop(0)


def _own_state(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of a module, without those of nested FSDP modules."""
    stack = [(path, module)]
    while stack:
        prefix, current = stack.pop()
        for name, parameter in current.named_parameters(recurse=False):
            yield _clean(f"{prefix}.{name}"), parameter
        for name, buffer in current.named_buffers(recurse=False):
            if name not in current._non_persistent_buffers_set:
                yield _clean(f"{prefix}.{name}"), buffer
        children = [
            (f"{prefix}.{name}", child)
            for name, child in current.named_children()
            if not isinstance(child, FullyShardedDataParallel)
        ]
        stack.extend(reversed(children))


def _clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part and part not in _WRAPPERS)
