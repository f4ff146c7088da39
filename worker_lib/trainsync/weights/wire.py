"""A stream over a group, bucket by bucket: sent from an iterator, received where it belongs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from trainsync.weights.buckets import Bucket, StreamSchema, plan_buckets
from trainsync.weights.errors import GroupFailedError, UnsupportedWeightsError
from trainsync.weights.group import IN_FLIGHT, BroadcastGroup, Transfer
from trainsync.weights.served import StagingSet
from trainsync.weights.stream_source import NamedTensors, SchemaChangedError, StreamSource


@dataclass(frozen=True)
class Place:
    """Where a whole stream is laid, for those who read it there.

    Attributes:
        data: uint8 of the stream's size.
        laid: told after each bucket how many bytes of the stream are there.
    """

    data: torch.Tensor
    laid: Callable[[int], None]


class StreamSender:
    """Sends streams, always through the same two buffers."""

    def __init__(self, bucket_size: int, phase: Callable[[str], None]) -> None:
        self._bucket_size = bucket_size
        self._phase = phase
        self._buffers: list[torch.Tensor] = []

    def send(
        self,
        group: BroadcastGroup | None,
        schema: StreamSchema,
        tensors: NamedTensors,
        deadline: float,
        place: Place | None = None,
    ) -> str:
        """Every bucket, filling one while another is on the wire; returns the bytes' digest.

        ``tensors`` is read to its end also when sending fails.

        Args:
            group: None: nobody is to get it over the wire.
            place: where to lay the whole stream, and to send it from.
            deadline: of the whole, on the monotonic clock.

        Raises:
            GroupFailedError, SchemaChangedError, UnsupportedWeightsError.
        """
        hasher = xxhash.xxh3_128()
        plan = plan_buckets(schema, self._bucket_size)
        if place is None:
            self._allocate(max((bucket.size for bucket in plan), default=0))
        source = StreamSource(schema, tensors)
        transfers: list[Transfer] = []
        try:
            for number, bucket in enumerate(plan):
                if len(transfers) == IN_FLIGHT:
                    transfers[0].wait()
                    del transfers[0]
                if place is None:
                    data = source.fill(bucket, self._buffers[number % IN_FLIGHT])
                else:
                    data = _lay(source, bucket, place)
                hasher.update(data.numpy().data)
                if group is not None:
                    transfers.append(group.broadcast(data, deadline - time.monotonic()))
                self._phase("bucket")
            source.finish()
            for transfer in transfers:
                transfer.wait()
        except (GroupFailedError, SchemaChangedError, UnsupportedWeightsError):
            source.drain()
            raise
        finally:
            if not all(transfer.over() for transfer in transfers):
                self._buffers = []  # a collective may still read them
        return f"xxh3-128:{hasher.hexdigest()}"

    def _allocate(self, size: int) -> None:
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = []  # free the old ones first
            self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(IN_FLIGHT)]


def _lay(source: StreamSource, bucket: Bucket, place: Place) -> torch.Tensor:
    """The bucket's bytes, where they belong in the stream."""
    target = place.data[bucket.start : bucket.stop]
    data = source.fill(bucket, target)
    if data.data_ptr() != target.data_ptr():  # a large tensor itself
        target.copy_(data)
    place.laid(bucket.stop)
    return target


def receive_stream(
    group: BroadcastGroup,
    staged: StagingSet,
    bucket_size: int,
    deadline: float,
    phase: Callable[[str], None],
) -> str:
    """Fill ``staged``; returns the digest of what came.

    Raises:
        GroupFailedError: a collective failed; another may still write to ``staged``, which must
            not be used again.
    """
    hasher = xxhash.xxh3_128()
    transfers: list[tuple[Transfer, Bucket]] = []

    def take() -> None:
        transfer, bucket = transfers[0]
        transfer.wait()
        del transfers[0]
        hasher.update(staged.data[bucket.start : bucket.stop].numpy().data)
        phase("bucket")

    for bucket in plan_buckets(staged.schema, bucket_size):
        if len(transfers) == IN_FLIGHT:
            take()
        target = staged.data[bucket.start : bucket.stop]
        transfers.append((group.broadcast(target, deadline - time.monotonic()), bucket))
    while transfers:
        take()
    return f"xxh3-128:{hasher.hexdigest()}"
