"""A delta over the wire: the trainer sends it as it is found, explorers apply it as it comes.

    segment = where it ends in the stream (8 bytes) | bytes of its delta (8 bytes) | the delta

The last segment ends where the stream's last bucket does. What is found not to be worth it ends
with a segment of no place.
"""

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import xxhash

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import Bucket, pieces_of
from trainsync.weights.buckets.served import StagingSet
from trainsync.weights.delta.codec import Segment, apply_record, split
from trainsync.weights.errors import DeltaError, GroupFailedError
from trainsync.weights.transports.chain.chain import Chain

_HEAD: Final = struct.Struct("<QQ")
_NOT_WORTH_IT: Final = (1 << 64) - 1  # instead of a place in the stream
_MOST_PER_BYTE: Final = 32  # bytes of a delta for each of the stream: blocks of one byte take 27
_LEAST: Final = 64  # bytes of a delta that is for nearly nothing


class DeltaSending:
    """Sends segments to a chain. After a failure it takes what comes, and `finish` tells.

    Args:
        deadline: of the whole, on the monotonic clock.
        chain: which failed before it was there, if it is an error.
    """

    def __init__(self, chain: Chain | GroupFailedError, deadline: float) -> None:
        self._chain = chain
        self._deadline = deadline

    def take(self, segment: Segment | None) -> None:
        """The next one; None: the rest is not worth it. The last call but `finish` then."""
        if isinstance(self._chain, GroupFailedError):
            return
        stop = _NOT_WORTH_IT if segment is None else segment.stop
        size = 0 if segment is None else segment.delta.size
        try:
            self._chain.begin_bucket(self._deadline)
            self._chain.carry(memoryview(_HEAD.pack(stop, size)))
            if segment is not None:
                for piece in pieces_of(segment.delta.data):
                    self._chain.carry(piece)
            failpoint("send.bucket")
        except GroupFailedError as error:
            self._chain = error

    def finish(self) -> None:
        """Until every member has confirmed.

        Raises:
            GroupFailedError: a member did not get all of the delta.
        """
        if isinstance(self._chain, GroupFailedError):
            raise self._chain
        self._chain.confirm(self._deadline)


def receive_segments(chain: Chain, plan: Sequence[Bucket], deadline: float) -> Iterator[Segment]:
    """The segments that the trainer sends, each passed on as it is yielded. Read it to its end.

    Args:
        plan: the buckets of the stream.

    Raises:
        GroupFailedError: not all came, or not all of those behind have it.
        DeltaError: the trainer found it not to be worth it. The chain is as good as ever.
    """
    done, end = 0, plan[-1].stop if plan else 0
    while done < end:
        chain.begin_bucket(deadline)
        head = bytearray(_HEAD.size)
        chain.carry(memoryview(head))
        stop, size = _HEAD.unpack(head)
        if stop == _NOT_WORTH_IT:
            chain.confirm(deadline)
            raise DeltaError("too much changed: the whole version follows")
        if not done < stop <= end or size > _LEAST + _MOST_PER_BYTE * (stop - done):
            raise GroupFailedError(
                f"{size} bytes come for the changes between {done} and {stop} of {end}"
            )
        delta = np.empty(size, dtype=np.uint8)
        for piece in pieces_of(delta.data):
            chain.carry(piece)
        failpoint("receive.bucket")
        yield Segment(stop, delta)
        done = stop
    chain.confirm(deadline)


def change(staged: StagingSet, segments: Iterable[Segment], plan: Sequence[Bucket]) -> str:
    """Make the new version out of the base that ``staged`` holds; returns its digest.

    Every byte of it is read, so that a base that is not what it was thought to be is found too.

    Args:
        segments: read to their end in any case: others are behind in the chain.
        plan: the buckets of the stream; it is digested bucket by bucket.

    Raises:
        DeltaError: the delta is damaged or made for something else. And what ``segments`` raises.
    """
    staged.holds = None  # until it is whole
    changing = _Changing(staged, plan)
    trouble: DeltaError | None = None
    for segment in segments:
        if trouble is None:
            try:
                changing.take(segment)
            except DeltaError as error:
                trouble = error
    if trouble is not None:
        raise trouble
    return changing.digest()


class _Changing:
    def __init__(self, staged: StagingSet, plan: Sequence[Bucket]) -> None:
        self._target = staged.data.numpy()
        self._plan = iter(plan)
        self._left = len(plan)
        self._stop = 0
        self._hasher = xxhash.xxh3_128()

    def take(self, segment: Segment) -> None:
        """Apply one and digest its stretch, block by block, while the processor's cache has it."""
        records = deque(split(segment.delta, self._target.size) if segment.delta.size else ())
        while self._stop < segment.stop and (bucket := next(self._plan, None)) is not None:
            self._left -= 1
            done, self._stop = bucket.start, bucket.stop
            while (
                records and done <= records[0].block.start and records[0].block.stop <= self._stop
            ):
                record = records.popleft()
                apply_record(record, self._target)
                self._hasher.update(self._target[done : record.block.stop].data)
                done = record.block.stop
            self._hasher.update(self._target[done : self._stop].data)
        if records or self._stop != segment.stop:
            raise DeltaError(f"a delta of the bytes before {segment.stop} has other blocks")

    def digest(self) -> str:
        if self._left:
            raise DeltaError(f"a delta ends at {self._stop}, before {self._left} buckets")
        return f"xxh3-128:{self._hasher.hexdigest()}"
