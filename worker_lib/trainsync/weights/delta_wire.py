"""A delta over the wire: the trainer sends it, an explorer makes the new version out of it."""

import time
from collections.abc import Callable

import torch
import xxhash

from trainsync.weights.buckets import plan_buckets
from trainsync.weights.delta import apply
from trainsync.weights.group import IN_FLIGHT, BroadcastGroup, Transfer
from trainsync.weights.served import StagingSet


def pass_bytes(
    group: BroadcastGroup,
    data: torch.Tensor,
    bucket_size: int,
    deadline: float,
    phase: Callable[[str], None],
) -> None:
    """Send ``data`` (uint8) from the root to every member, which calls this with memory for it.

    Args:
        deadline: of the whole, on the monotonic clock.

    Raises:
        GroupFailedError: a collective failed; another may still use ``data``.
    """
    transfers: list[Transfer] = []
    for start in range(0, data.numel(), bucket_size):
        if len(transfers) == IN_FLIGHT:
            transfers.pop(0).wait()
        part = data[start : start + bucket_size]
        transfers.append(group.broadcast(part, deadline - time.monotonic()))
        phase("bucket")
    for transfer in transfers:
        transfer.wait()


def change(staged: StagingSet, delta: torch.Tensor, bucket_size: int) -> str:
    """Make the new version out of the base that ``staged`` holds; returns its digest.

    Raises:
        DeltaError: the delta is damaged or made for something else.
    """
    staged.holds = None  # until it is whole
    apply(delta.numpy(), staged.data.numpy())
    hasher = xxhash.xxh3_128()
    for bucket in plan_buckets(staged.schema, bucket_size):
        hasher.update(staged.data[bucket.start : bucket.stop].numpy().data)
    return f"xxh3-128:{hasher.hexdigest()}"
