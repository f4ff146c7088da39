"""The trainer's copy of the last version, and the changes of the next one."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import xxhash

from trainsync.weights.buckets.layout import Bucket, StreamSchema, plan_buckets
from trainsync.weights.buckets.served import StagingSet, allocate
from trainsync.weights.buckets.tensor_stream import (
    NamedTensors,
    SchemaChangedError,
    StreamSource,
    check_time,
    schema_of,
)
from trainsync.weights.delta.codec import (
    Block,
    Bytes,
    Coding,
    Segment,
    blocks,
    encode_block,
    join,
)
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.delta.switch import MOST_OF_FULL
from trainsync.weights.errors import (
    GroupFailedError,
    InconsistentUploadError,
    UnsupportedWeightsError,
)

logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 8 << 20
"""Of the stream, at least, between two segments: the explorers have this much left to do when the
trainer is done, and wake up for it."""

_NOTHING: Final = np.empty(0, dtype=np.uint8)

Tell = Callable[[Segment | None], None]
"""Told each segment as it is found, in order; None when the rest is not worth it."""


@dataclass(frozen=True)
class HeldVersion:
    """One version in the trainer's memory.

    Attributes:
        memory: the whole stream; belongs to the `DeltaBase`.
        base: digest of the version that ``delta`` starts from; None when there is no delta.
        delta: what changed, up to the end of the stream; None when it is not known, or too much.
        too_much: it was looked for, and so much had changed that it was given up.
    """

    digest: str
    memory: StagingSet
    base: str | None = None
    delta: tuple[Segment, ...] | None = None
    too_much: bool = False

    @property
    def delta_bytes(self) -> int:
        """Bytes of what changed; 0 when there is no delta."""
        return sum(segment.delta.size for segment in self.delta or ())


class DeltaBase:
    """Keeps one copy of the model on the host: the base of the next delta. One thread.

    Args:
        bucket_size: bytes; how much of the stream is looked at at once, and digested.
        coding: of the deltas.

    Raises:
        DeltaError: as `prepare`.
    """

    def __init__(self, bucket_size: int, coding: Coding = Coding.PAGES) -> None:
        prepare(compact=coding is Coding.COMPACT)
        self._coding = coding
        self._bucket_size = bucket_size
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._held: HeldVersion | None = None

    @property
    def held(self) -> HeldVersion | None:
        """The version that is held; None while there is none, and while it is written to."""
        return self._held

    def advance(
        self,
        tensors: Callable[[], NamedTensors],
        digest: str | None = None,
        deadline: float = math.inf,
    ) -> HeldVersion:
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
        if held is not None:
            try:
                return self.follow(tensors(), deadline, lambda _: None)
            except SchemaChangedError as error:
                logger.info("all of the weights is sent: %s", error)
            held = None  # free the old copy first
        try:
            self._held = self._fill(
                allocate(schema_of(tensors())), None, tensors(), deadline, lambda _: None
            )
        except SchemaChangedError as error:
            raise InconsistentUploadError(f"tensors change from call to call: {error}") from error
        return self._held

    def follow(self, tensors: NamedTensors, deadline: float, tell: Tell) -> HeldVersion:
        """Bring the copy, which must be there, to the next version, and tell what changed.

        Args:
            tensors: read once, to its end.
            deadline: of the version, on the monotonic clock.

        Raises:
            SchemaChangedError: names, dtypes or shapes are not those of the last version. There is
                no copy then. Nor is there after any other error.
            GroupFailedError, UnsupportedWeightsError: as `advance`.
        """
        held, self._held = self._held, None  # until the copy is whole again
        if held is None:
            raise RuntimeError("there is no copy that could follow")
        self._held = self._fill(held.memory, held.digest, tensors, deadline, tell)
        return self._held

    def close(self) -> None:
        """Give the memory back."""
        self._held = None

    def _fill(
        self,
        memory: StagingSet,
        former: str | None,
        tensors: NamedTensors,
        deadline: float,
        tell: Tell,
    ) -> HeldVersion:
        schema, copy = memory.schema, memory.data.numpy()
        hasher = xxhash.xxh3_128()
        source = StreamSource(schema, tensors)
        found = _Found(schema.total, tell, self._coding, worthwhile=former is not None)
        plan = plan_buckets(schema, self._bucket_size)
        self._allocate(max((bucket.size for bucket in plan), default=0))
        try:
            for bucket in plan:
                check_time(deadline)
                data: Bytes = source.fill(bucket, self._buffer).numpy()
                here = copy[bucket.start : bucket.stop]
                done = 0
                for block in blocks_of(schema, bucket):
                    start, stop = block.start - bucket.start, block.stop - bucket.start
                    if found.worthwhile:
                        found.take(
                            encode_block(here[start:stop], data[start:stop], block, self._coding)
                        )
                    else:
                        here[start:stop] = data[start:stop]
                    hasher.update(data[done:stop].data)  # while the processor's cache has it
                    done = stop
                found.end(bucket.stop, last=bucket is plan[-1])
            source.finish()
        except (GroupFailedError, SchemaChangedError, UnsupportedWeightsError):
            source.drain()
            raise
        digest = f"xxh3-128:{hasher.hexdigest()}"
        if not found.worthwhile:
            return HeldVersion(digest, memory, too_much=former is not None)
        return HeldVersion(digest, memory, former, tuple(found.segments))

    def _allocate(self, size: int) -> None:
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.zeros(size, dtype=torch.uint8)


class _Found:
    """The changes, as long as they are few enough to be worth sending."""

    def __init__(self, total: int, tell: Tell, coding: Coding, *, worthwhile: bool) -> None:
        self.worthwhile = worthwhile
        self.segments: list[Segment] = []
        self._total = total
        self._tell = tell
        self._coding = coding
        self._records: list[Bytes] = []
        self._room = int(total * MOST_OF_FULL)
        self._told = 0

    def take(self, record: Bytes | None) -> None:
        """Keep this block's record."""
        if record is None:
            return
        self._records.append(record)
        self._room -= record.size
        if self._room < 0:
            self.worthwhile = False
            self._records.clear()
            self.segments.clear()
            self._tell(None)

    def end(self, stop: int, *, last: bool) -> None:
        """A bucket ends here: tell what was found, if the last time was long enough ago."""
        if not self.worthwhile or (stop - self._told < SEGMENT_BYTES and not last):
            return
        delta = join(self._records, self._total, self._coding) if self._records else _NOTHING
        self._records.clear()
        self._told = stop
        self.segments.append(Segment(stop, delta))
        self._tell(self.segments[-1])


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
