"""Copy a state into staged memory, so that the next optimizer step cannot change what is saved.

*Immediate* staging: when `stage` returns, the copy is done and the parameters are free to change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainsync.checkpoint.copying import Copy, copy_all
from trainsync.checkpoint.errors import UnsupportedStateError
from trainsync.checkpoint.tree import map_tensors

# torch.save aligns tensors in a file so; it also suits every dtype and vectorised copies.
_ALIGNMENT = 64

_Key = tuple[
    int, int | torch.SymInt, torch.Size, tuple[int, ...], torch.dtype, torch.device, bool, bool
]


@dataclass(frozen=True)
class Staged:
    """A copy of a state that owns its bytes until its buffer is reused."""

    state: Any
    bytes: int


def stage(state: Any, buffer: Callable[[int, bool], torch.Tensor]) -> Staged:
    """Copy ``state`` into one buffer and rebuild it around the copy.

    Tensors that are the same view of the same storage (tied weights) stay one tensor. DTensors
    keep their type, mesh and placements, and hold the copy of their local shard. Parameters
    become plain tensors. Strided tensors of every dtype and device are taken.

    Args:
        state: see `trainsync.checkpoint.tree.map_tensors`.
        buffer: gives a uint8 CPU tensor of at least so many bytes, pinned if the flag says so.

    Raises:
        UnsupportedStateError: something that could not be saved or loaded.
    """
    plan = _Plan()
    map_tensors(state, plan.add)
    copies = _copy(plan, buffer(plan.bytes, plan.accelerated))

    def rebuild(tensor: torch.Tensor, path: str) -> torch.Tensor:
        copied = copies[plan.keys[id(tensor)]]
        if isinstance(tensor, DTensor):
            # from_local would move the copy to the mesh's device; the spec makes it a shard.
            return DTensor(copied, tensor._spec, requires_grad=False)
        return copied

    return Staged(map_tensors(state, rebuild), plan.bytes)


class _Plan:
    """Where each distinct local tensor goes in the buffer."""

    def __init__(self) -> None:
        self.placed: dict[_Key, tuple[torch.Tensor, int]] = {}
        self.keys: dict[int, _Key] = {}  # by id() of the caller's tensors, which outlive the plan
        self.bytes = 0
        self.accelerated = False

    def add(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        local = _local(tensor, path)
        key = self.keys[id(tensor)] = _key(local)
        if key not in self.placed:
            self.placed[key] = (local, self.bytes)
            size = local.numel() * local.element_size()
            self.bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
            self.accelerated = self.accelerated or local.device.type != "cpu"
        return tensor


def _copy(plan: _Plan, memory: torch.Tensor) -> dict[_Key, torch.Tensor]:
    storage = memory.untyped_storage()
    copies: dict[_Key, torch.Tensor] = {}
    plain: list[Copy] = []
    devices: set[torch.device] = set()
    with torch.no_grad():
        for key, (source, offset) in plan.placed.items():
            size = source.numel() * source.element_size()
            if size == 0:
                # Not in the buffer: torch.save tells storages apart by address, and this one's
                # would be that of its neighbour.
                copies[key] = torch.empty(source.shape, dtype=source.dtype)
                continue
            # A storage of its own for every tensor: torch.save writes whole storages.
            own = storage[offset : offset + size]
            target = torch.empty(0, dtype=source.dtype).set_(own).view(source.shape)
            copies[key] = target
            if source.device.type != "cpu":
                target.copy_(source, non_blocking=True)
                devices.add(source.device)
            elif source.is_contiguous() and not source.is_conj() and not source.is_neg():
                plain.append(Copy(target.data_ptr(), source.data_ptr(), size))
            else:
                target.copy_(source)
    copy_all(plain, torch.get_num_threads())
    for device in devices:
        done = torch.Event(device)
        done.record()
        done.synchronize()
    return copies


def _local(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The tensor's own bytes on this rank; refuses what has none or is not a plain tensor."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnsupportedStateError(
            f"{path} is a {type(tensor).__name__}; expected a plain tensor or a DTensor"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        what = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise UnsupportedStateError(f"{path} is {what}; expected a dense tensor with data")
    return tensor


def _key(tensor: torch.Tensor) -> _Key:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )
