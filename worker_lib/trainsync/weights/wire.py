"""A stream over a group, bucket by bucket: sent from an iterator, received where it belongs."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import xxhash

from trainsync.weights.buckets import Bucket, StreamSchema, plan_buckets
from trainsync.weights.errors import GroupFailedError, UnsupportedWeightsError
from trainsync.weights.group import BroadcastGroup, Transfer
from trainsync.weights.served import StagingSet
from trainsync.weights.stream_source import NamedTensors, SchemaChangedError, StreamSource

_BUFFERS: Final = 2  # and as many batches on the wire; large tensors are sent where they lie


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
            self._allocate(min(self._bucket_size, schema.total))
        source = StreamSource(schema, tensors)
        flying: deque[list[Transfer]] = deque()
        try:
            for number, batch in enumerate(batches(plan, self._bucket_size)):
                if len(flying) == _BUFFERS:
                    _land(flying)
                flying.append([])
                free = self._buffers[number % _BUFFERS] if place is None else None
                for bucket in batch:
                    check_time(deadline)  # a group looks at it too, but there may be none
                    if place is not None:
                        data = place.data[bucket.start : bucket.stop]
                        source.lay(bucket, data, hasher.update)
                        place.laid(bucket.stop)
                    else:
                        assert free is not None
                        data = source.fill(bucket, free)
                        if data.data_ptr() == free.data_ptr():
                            free = free[bucket.size :]
                    if group is not None:
                        transfer = group.broadcast(data, deadline - time.monotonic())
                        flying[-1].append(transfer)
                    if place is None:
                        hasher.update(data.numpy().data)  # while it is on the wire
                    self._phase("bucket")
            source.finish()
            while flying:
                _land(flying)
        except (GroupFailedError, SchemaChangedError, UnsupportedWeightsError):
            source.drain()
            raise
        finally:
            if not all(transfer.over() for batch in flying for transfer in batch):
                self._buffers = []  # a collective may still read them
        return f"xxh3-128:{hasher.hexdigest()}"

    def _allocate(self, size: int) -> None:
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = []  # free the old ones first
            self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(_BUFFERS)]


def check_time(deadline: float) -> None:
    """Look at a version's deadline, on the monotonic clock.

    Raises:
        GroupFailedError: it has passed.
    """
    if time.monotonic() >= deadline:
        raise GroupFailedError("the version's deadline has passed")


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
    waiting = deque(batches(plan_buckets(staged.schema, bucket_size), bucket_size))
    flying: deque[list[Transfer]] = deque()
    coming: deque[list[Bucket]] = deque()

    def post() -> None:
        if waiting:
            batch = waiting.popleft()
            coming.append(batch)
            flying.append([])
            for bucket in batch:
                target = staged.data[bucket.start : bucket.stop]
                flying[-1].append(group.broadcast(target, deadline - time.monotonic()))

    for _ in range(_BUFFERS):
        post()
    while coming:
        _land(flying)
        post()  # before the digest: the wire is never idle
        for bucket in coming.popleft():
            hasher.update(staged.data[bucket.start : bucket.stop].numpy().data)
            phase("bucket")
    return f"xxh3-128:{hasher.hexdigest()}"


def batches(plan: Sequence[Bucket], size: int) -> Iterator[list[Bucket]]:
    """Consecutive buckets of at most ``size`` bytes together.

    They are waited for together: to wake up for each costs more than a large one's transfer.
    """
    batch: list[Bucket] = []
    room = size
    for bucket in plan:
        if bucket.size > room and batch:
            yield batch
            batch, room = [], size
        batch.append(bucket)
        room -= bucket.size
    if batch:
        yield batch


def _land(flying: deque[list[Transfer]]) -> None:
    """Wait for the oldest batch; the last first, since the others are there by then."""
    for transfer in reversed(flying[0]):
        transfer.wait()
    flying.popleft()
