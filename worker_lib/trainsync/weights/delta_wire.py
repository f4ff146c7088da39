"""A delta over the wire: the trainer sends it, an explorer makes the new version out of it."""

from collections.abc import Callable
from concurrent.futures import Executor

import torch
import xxhash

from trainsync.weights.buckets import plan_buckets
from trainsync.weights.chain import Chain, pieces_of
from trainsync.weights.delta import apply_record, split
from trainsync.weights.served import StagingSet


def pass_bytes(
    chain: Chain,
    data: torch.Tensor,
    bucket_size: int,
    deadline: float,
    phase: Callable[[str], None],
) -> None:
    """Send ``data`` (uint8) from the trainer to every member, which calls this with memory for it.

    Args:
        deadline: of the whole, on the monotonic clock.

    Raises:
        GroupFailedError: somebody did not get all of it.
    """
    whole = data.numpy().data
    for start in range(0, len(whole), bucket_size):
        chain.begin_bucket(deadline)
        for piece in pieces_of(whole[start : start + bucket_size]):
            chain.carry(piece)
        phase("bucket")
    chain.confirm(deadline)


def change(staged: StagingSet, delta: torch.Tensor, bucket_size: int, pool: Executor) -> str:
    """Make the new version out of the base that ``staged`` holds; returns its digest.

    Args:
        pool: where blocks are changed, while this thread takes the digest of those before.

    Raises:
        DeltaError: the delta is damaged or made for something else.
    """
    staged.holds = None  # until it is whole
    target = staged.data.numpy()
    records = split(delta.numpy(), target.size)
    changing = [(record.block, pool.submit(apply_record, record, target)) for record in records]
    changing.reverse()
    hasher = xxhash.xxh3_128()
    try:
        for bucket in plan_buckets(staged.schema, bucket_size):
            while changing and changing[-1][0].start < bucket.stop:
                changing.pop()[1].result()
            hasher.update(target[bucket.start : bucket.stop].data)
    finally:
        for _, job in changing:  # nobody writes to the set after this has returned
            if not job.cancel():
                job.exception()
    return f"xxh3-128:{hasher.hexdigest()}"
