"""The ranks of a process group of torch."""

from typing import Any

import torch.distributed as dist


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of ``group``, as the default group numbers them; (0,) without torch.distributed.

    Args:
        group: of torch.distributed; None: the default one.

    Raises:
        ValueError: this rank is not of the group, or there is no torch.distributed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("a process group was given before torch.distributed was initialized")
        return (0,)
    if group is None:
        return tuple(range(dist.get_world_size()))
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not of the process group that was given; expected a call "
            "on the group's own ranks alone"
        )
    return tuple(dist.get_process_group_ranks(group))
