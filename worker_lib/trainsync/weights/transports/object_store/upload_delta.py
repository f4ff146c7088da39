"""What one rank uploaded last, kept so that only what changed has to travel to the explorers."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from trainsync.weights.buckets.schema import Schema
from trainsync.weights.delta.codec import blocks, encode_block, join, prepare
from trainsync.weights.transports.object_store.packing import Bytes, UploadBucket

_MOST_OF_FULL: Final = 0.25  # a delta of a greater share of a bucket is not worth its making


@dataclass(frozen=True)
class BucketDelta:
    """What changed in a bucket.

    Attributes:
        base: digest of the bucket that it starts from.
        arrays: for each array of the bucket a delta (uint8); an empty one where nothing changed.
    """

    base: str
    arrays: tuple[Bytes, ...]


@dataclass
class _Held:
    digest: str
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
        self._held: dict[int, _Held] = {}

    def expect(self, schema: Schema) -> None:
        """Buckets of this schema come next; those of another one are no base for them."""
        if schema != self._schema:
            self._held.clear()
            self._schema = schema
            self._sizes = {(p.bucket, p.index): p.itemsize for p in schema.pieces}

    def advance(self, number: int, bucket: UploadBucket) -> BucketDelta | None:
        """Keep bucket ``number`` of the schema; what changed in it since the last time.

        None when that is not known, or is so much that the bucket may as well be sent. A bucket
        that did not change has nothing but empty arrays.
        """
        held = self._held.pop(number, None)  # it is of no use if this fails
        if held is None:
            self._held[number] = _Held(bucket.digest, tuple(a.copy() for a in bucket.arrays))
            return None
        found = self._compare(number, held, bucket)
        self._held[number] = _Held(bucket.digest, held.arrays)
        if sum(array.nbytes for array in found) > _MOST_OF_FULL * bucket.bytes:
            return None
        return BucketDelta(held.digest, found)

    def _compare(self, number: int, held: _Held, bucket: UploadBucket) -> tuple[Bytes, ...]:
        """The deltas of all arrays; ``held`` has the bucket's bytes then."""
        nothing = np.empty(0, dtype=np.uint8)
        found = []
        for index, (base, new) in enumerate(zip(held.arrays, bucket.arrays, strict=True)):
            records = []
            for block in blocks(0, new.size, self._sizes[number, index]):
                part = slice(block.start, block.stop)
                record = encode_block(base[part], new[part], block)
                if record is not None:
                    records.append(record)
            found.append(join(records, new.size) if records else nothing)
        return tuple(found)
