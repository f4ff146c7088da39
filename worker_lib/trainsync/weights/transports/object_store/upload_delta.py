"""The last upload of one rank, kept so that only its changes have to travel to the explorers."""

from dataclasses import dataclass

import numpy as np

from trainsync.weights.buckets.schema import Schema
from trainsync.weights.delta.codec import blocks, encode_block, join
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.delta.switch import (
    MOST_OF_FULL,
    OFF_AFTER,
    ON_BELOW,
    delta_share,
    sample_of,
)
from trainsync.weights.transports.object_store.packing import Bytes, UploadBucket


@dataclass(frozen=True)
class BucketDelta:
    """The changes in a bucket.

    Attributes:
        base: digest of the bucket that it starts from.
        arrays: for each array of the bucket a delta (uint8); an empty one where nothing changed.
    """

    base: str
    arrays: tuple[Bytes, ...]


@dataclass
class _UploadedBucket:
    digest: str
    arrays: tuple[Bytes, ...]
    misses: int = 0  # versions in a row of which too much had changed


@dataclass
class _Sampled:
    """A bucket in which too much changes: a little of each array."""

    arrays: tuple[Bytes, ...]


class UploadBase:
    """A rank's buckets, in memory of its own. One thread.

    Each bucket stands for itself: after an upload that failed half-way some are those of the new
    version, and their digests say so.

    Raises:
        DeltaError: as `prepare`.
    """

    def __init__(self) -> None:
        prepare()
        self._schema: Schema | None = None
        self._sizes: dict[tuple[int, int], int] = {}
        self._held: dict[int, _UploadedBucket] = {}
        self._sampled: dict[int, _Sampled] = {}

    def expect(self, schema: Schema) -> None:
        """Buckets of this schema come next; those of another one are no base for them."""
        if schema != self._schema:
            self._held.clear()
            self._sampled.clear()
            self._schema = schema
            self._sizes = {(p.bucket, p.index): p.itemsize for p in schema.pieces}

    def advance(self, number: int, bucket: UploadBucket) -> BucketDelta | None:
        """Keep bucket ``number`` of the schema; what changed in it since the last time.

        None when that is not known, or is so much that the bucket may as well be sent. A bucket
        that did not change has nothing but empty arrays.
        """
        held = self._held.pop(number, None)  # it is of no use if this fails
        if held is None:
            if not self._changes_too_much(number, bucket):
                self._held[number] = _UploadedBucket(
                    bucket.digest, tuple(a.copy() for a in bucket.arrays)
                )
            return None
        found = self._compare(number, held, bucket)
        if found is not None:
            self._held[number] = _UploadedBucket(bucket.digest, held.arrays)
            return BucketDelta(held.digest, found)
        if held.misses + 1 < OFF_AFTER:
            self._held[number] = _UploadedBucket(bucket.digest, held.arrays, held.misses + 1)
        else:
            self._sampled[number] = _Sampled(tuple(sample_of(a) for a in bucket.arrays))
        return None

    @property
    def off(self) -> str:
        """Why what changed is not looked for in some buckets; empty while it is in all."""
        if not self._sampled:
            return ""
        total = len(self._sampled) + len(self._held)
        return f"too much changes each time in {len(self._sampled)} of {total} buckets"

    def _changes_too_much(self, number: int, bucket: UploadBucket) -> bool:
        """Whether to do without a copy of it still, as far as a sample tells."""
        former = self._sampled.pop(number, None)
        if former is None:
            return False
        now = tuple(sample_of(array) for array in bucket.arrays)
        sizes = [self._sizes[number, index] for index in range(len(now))]
        shares = [
            array.nbytes * delta_share(old, new, size)
            for array, old, new, size in zip(bucket.arrays, former.arrays, now, sizes, strict=True)
        ]
        if sum(shares) < ON_BELOW * bucket.bytes:
            return False
        self._sampled[number] = _Sampled(now)
        return True

    def _compare(
        self, number: int, held: _UploadedBucket, bucket: UploadBucket
    ) -> tuple[Bytes, ...] | None:
        """The deltas of all arrays, None when they are not worth it; ``held`` has the bucket's
        bytes then."""
        room = MOST_OF_FULL * bucket.bytes
        nothing = np.empty(0, dtype=np.uint8)
        found = []
        for index, (base, new) in enumerate(zip(held.arrays, bucket.arrays, strict=True)):
            records = []
            for block in blocks(0, new.size, self._sizes[number, index]):
                part = slice(block.start, block.stop)
                if room < 0:
                    base[part] = new[part]
                    continue
                record = encode_block(base[part], new[part], block)
                if record is not None:
                    records.append(record)
                    room -= record.nbytes
            found.append(join(records, new.size) if records else nothing)
        return None if room < 0 else tuple(found)
