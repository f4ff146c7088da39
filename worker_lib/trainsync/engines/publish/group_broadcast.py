"""Broadcast weights in a process group of torch, tensor by tensor, without versions."""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from trainsync.engines.adapt import adapt

_NO_MEMBER: Final = -100
"""Torch's `GroupMember.NON_GROUP_MEMBER`, on ranks that are not of a group."""


def is_process_group(value: Any) -> bool:
    """Whether it is a process group of torch, or what a rank has that is not of the group."""
    if value is None or value == _NO_MEMBER:
        return _rank() > 0  # rank 0 sends, and has to be of the group
    return isinstance(value, dist.ProcessGroup | Backend)


def broadcast_in_group(engine: Any, group: Any) -> None:
    """Broadcast every weight of ``engine`` from trainer rank 0, which is rank 0 of ``group``.

    Every trainer rank calls it, and gathers along. The other members of the group receive as many
    tensors, in the order, with the shapes and dtypes of ``engine.get_per_tensor_param()``, by
    ``group.broadcast``: they are not told names, versions or digests. A member that dies ends it
    when the group's own timeout is over; use `ModelUpdateGroup.create` where explorers may die.

    Args:
        engine: see `trainsync.engines.protocol.adapt`.
        group: a process group of torch; None on trainer ranks that are not of it.

    Raises:
        ValueError: trainer rank 0 is not rank 0 of the group.
        RuntimeError: of torch, a broadcast failed.
    """
    sends = _rank() == 0
    if sends and group.rank() != 0:
        raise ValueError(
            f"trainer rank 0 is rank {group.rank()} of the process group; expected rank 0, which "
            "sends"
        )
    options = dist.BroadcastOptions()
    options.rootRank = 0
    for _, tensor in adapt(engine).get_per_tensor_param():
        if sends:
            group.broadcast([tensor.detach().contiguous()], options).wait()
        elif _is_member(group):
            group.broadcast([torch.empty_like(tensor)], options).wait()


def _is_member(group: Any) -> bool:
    return group is not None and group != _NO_MEMBER


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
