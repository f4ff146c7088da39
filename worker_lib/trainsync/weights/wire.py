"""A stream over a group, bucket by bucket: sent from an iterator, received where it belongs."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import xxhash

from trainsync.weights.buckets import Bucket, StreamSchema, plan_buckets
from trainsync.weights.errors import GroupFailedError, UnsupportedWeightsError
from trainsync.weights.group import IN_FLIGHT, BroadcastGroup, Transfer
from trainsync.weights.served import StagingSet
from trainsync.weights.stream_source import NamedTensors, SchemaChangedError, StreamSource

_BUFFERS: Final = 2  # for what is packed; large tensors are sent from where they lie


@dataclass(frozen=True)
class Place:
    """Where a whole stream is laid, for those who read it there.

    Attributes:
        data: uint8 of the stream's size.
        laid: told after each bucket how many bytes of the stream are there.
    """

    data: torch.Tensor
    laid: Callable[[int], None]


class _Flight:
    """Buckets on the wire, the oldest first. Of those that were packed, as many as buffers."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[Transfer, bool]] = deque()

    def make_room(self, *, packed: bool) -> None:
        """Wait until one more may be added, and until its buffer is free if it is ``packed``."""
        while len(self._transfers) >= IN_FLIGHT or (
            packed and sum(packed for _, packed in self._transfers) >= _BUFFERS
        ):
            self._transfers[0][0].wait()
            self._transfers.popleft()

    def add(self, transfer: Transfer, *, packed: bool) -> None:
        """One more, which `make_room` was called for."""
        self._transfers.append((transfer, packed))

    def land(self) -> None:
        """Wait for all."""
        while self._transfers:
            self._transfers[0][0].wait()
            self._transfers.popleft()

    def over(self) -> bool:
        """Whether nothing reads the memory of any."""
        return all(transfer.over() for transfer, _ in self._transfers)


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
        """Every bucket, filling one while others are on the wire; returns the bytes' digest.

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
        flight = _Flight()
        packed = 0
        try:
            for bucket in plan:
                data = None if place is not None else source.direct(bucket)
                in_place = place is not None or data is not None
                flight.make_room(packed=not in_place)
                if place is not None:
                    data = place.data[bucket.start : bucket.stop]
                    source.lay(bucket, data, hasher.update)
                    place.laid(bucket.stop)
                elif data is None:
                    data = source.fill(bucket, self._buffers[packed % len(self._buffers)])
                    packed += 1
                if group is not None:
                    transfer = group.broadcast(data, deadline - time.monotonic())
                    flight.add(transfer, packed=not in_place)
                if place is None:
                    hasher.update(data.numpy().data)  # while it is on the wire
                self._phase("bucket")
            source.finish()
            flight.land()
        except (GroupFailedError, SchemaChangedError, UnsupportedWeightsError):
            source.drain()
            raise
        finally:
            if not flight.over():
                self._buffers = []  # a collective may still read them
        return f"xxh3-128:{hasher.hexdigest()}"

    def _allocate(self, size: int) -> None:
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = []  # free the old ones first
            self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(_BUFFERS)]


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
    plan = plan_buckets(staged.schema, bucket_size)
    transfers: deque[Transfer] = deque()

    def post(bucket: Bucket) -> None:
        target = staged.data[bucket.start : bucket.stop]
        transfers.append(group.broadcast(target, deadline - time.monotonic()))

    for bucket in plan[:IN_FLIGHT]:
        post(bucket)
    for number, bucket in enumerate(plan, start=IN_FLIGHT):
        transfers[0].wait()
        transfers.popleft()
        if number < len(plan):
            post(plan[number])  # before the digest: the wire is never idle
        hasher.update(staged.data[bucket.start : bucket.stop].numpy().data)
        phase("bucket")
    return f"xxh3-128:{hasher.hexdigest()}"
