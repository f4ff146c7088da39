"""The trainer's copy of the last version, and what the next one changes in it."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

import torch
import xxhash

from trainsync.weights.buckets import Bucket, StreamSchema, plan_buckets
from trainsync.weights.delta import Block, Bytes, blocks, encode_block, join, workers
from trainsync.weights.errors import (
    GroupFailedError,
    InconsistentUploadError,
    UnsupportedWeightsError,
)
from trainsync.weights.served import StagingSet, allocate
from trainsync.weights.stream_source import (
    NamedTensors,
    SchemaChangedError,
    StreamSource,
    schema_of,
)
from trainsync.weights.wire import check_time

logger = logging.getLogger(__name__)

MOST_OF_FULL: Final = 0.25
"""A delta of a greater share of the full bytes is not worth its making, nor its memory."""

_BUFFERS: Final = 2  # one is filled while the other is compared


@dataclass(frozen=True)
class Held:
    """One version in the trainer's memory.

    Attributes:
        memory: the whole stream; belongs to the `DeltaBase`.
        base: digest of the version that ``delta`` starts from; None when there is no delta.
        delta: bytes of what changed.
    """

    digest: str
    memory: StagingSet
    base: str | None = None
    delta: torch.Tensor | None = None


class DeltaBase:
    """Keeps one copy of the model on the host: the base of the next delta.

    One thread at a time; it has others work for it.

    Args:
        bucket_size: bytes; how much of the stream is looked at at once, and digested.
    """

    def __init__(self, bucket_size: int) -> None:
        self._bucket_size = bucket_size
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._held: Held | None = None
        self._pool = workers()

    def advance(
        self,
        tensors: Callable[[], NamedTensors],
        digest: str | None = None,
        deadline: float = math.inf,
    ) -> Held:
        """Bring the copy to the next version, and find out what that changed.

        Args:
            digest: of the version, when it was held before. If it still is, nothing is done.
            tensors: gives an iterator, which is read once, and once more when names, dtypes or
                shapes are not those of the last version. Always to its end.
            deadline: of the version, on the monotonic clock.

        Raises:
            GroupFailedError: the deadline has passed. There is no copy then.
            UnsupportedWeightsError: a value is not a full dense tensor.
            InconsistentUploadError: names, dtypes or shapes differ from call to call.
        """
        held = self._held
        if held is not None and held.digest == digest:
            return held
        self._held = None  # until the copy is whole again
        if held is not None:
            try:
                self._held = self._fill(held.memory, held.digest, tensors(), deadline)
                return self._held
            except SchemaChangedError as error:
                logger.info("all of the weights is sent: %s", error)
            held = None  # free the old copy first
        try:
            self._held = self._fill(allocate(schema_of(tensors())), None, tensors(), deadline)
        except SchemaChangedError as error:
            raise InconsistentUploadError(f"tensors change from call to call: {error}") from error
        return self._held

    def close(self) -> None:
        """Give the memory back."""
        self._held = None
        self._pool.shutdown(cancel_futures=True)

    def _fill(
        self, memory: StagingSet, former: str | None, tensors: NamedTensors, deadline: float
    ) -> Held:
        schema, copy = memory.schema, memory.data.numpy()
        hasher = xxhash.xxh3_128()
        source = StreamSource(schema, tensors)
        found = _Found(schema.total, worthwhile=former is not None)
        plan = plan_buckets(schema, self._bucket_size)
        self._allocate(max((bucket.size for bucket in plan), default=0))
        flying: deque[list[Future[bytes | None]]] = deque()
        try:
            for number, bucket in enumerate(plan):
                check_time(deadline)
                if len(flying) == _BUFFERS:
                    found.take(flying.popleft())
                data: Bytes = source.fill(bucket, self._buffers[number % _BUFFERS]).numpy()
                if found.worthwhile:
                    flying.append(self._compare(schema, bucket, copy, data))
                else:
                    here = copy[bucket.start : bucket.stop]
                    flying.append([self._pool.submit(_copy, here, data)])
                hasher.update(data.data)
            source.finish()
            for jobs in flying:
                found.take(jobs)
        except (GroupFailedError, SchemaChangedError, UnsupportedWeightsError):
            source.drain()
            raise
        finally:
            wait([job for jobs in flying for job in jobs])  # they write to the copy
        digest = f"xxh3-128:{hasher.hexdigest()}"
        if not found.worthwhile:
            return Held(digest, memory)
        delta = torch.from_numpy(join(found.records, schema.total))
        return Held(digest, memory, former, delta)

    def _compare(
        self, schema: StreamSchema, bucket: Bucket, copy: Bytes, data: Bytes
    ) -> list[Future[bytes | None]]:
        """The records of the bucket's blocks; the copy is brought to the new version meanwhile."""
        return [
            self._pool.submit(
                encode_block,
                copy[block.start : block.stop],
                data[block.start - bucket.start : block.stop - bucket.start],
                block,
            )
            for block in blocks_of(schema, bucket)
        ]

    def _allocate(self, size: int) -> None:
        if self._buffers[0].numel() < size:
            self._buffers.clear()  # free the old ones first
            self._buffers += [torch.zeros(size, dtype=torch.uint8) for _ in range(_BUFFERS)]


class _Found:
    """Records of what changed, as long as they are few enough to be worth it."""

    def __init__(self, total: int, *, worthwhile: bool) -> None:
        self.worthwhile = worthwhile
        self.records: list[bytes] = []
        self._room = int(total * MOST_OF_FULL)

    def take(self, jobs: list[Future[bytes | None]]) -> None:
        """Wait for these, and keep what they found."""
        for job in jobs:
            record = job.result()
            if record is not None and self.worthwhile:
                self.records.append(record)
                self._room -= len(record)
                self.worthwhile = self._room >= 0


def blocks_of(schema: StreamSchema, bucket: Bucket) -> Iterator[Block]:
    """The bucket's bytes in blocks: neighbours with elements of one size together."""
    start = itemsize = 0
    stop = -1
    for piece in bucket.slices:
        size = schema.tensors[piece.tensor].itemsize
        if size != itemsize:
            if stop > start:
                yield from blocks(start, stop, itemsize)
            start, itemsize = bucket.start + piece.offset, size
        stop = bucket.start + piece.offset + piece.stop - piece.start
    if stop > start:
        yield from blocks(start, stop, itemsize)


def _copy(target: Bytes, data: Bytes) -> None:
    """No record: all of it is sent."""
    target[:] = data
