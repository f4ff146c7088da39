"""The bytes of anchors and deltas.

anchor = "tsa1" | bytes of the schema (8) | schema | the stream
delta  = segments: where each ends in the stream (8) | bytes (8) | delta (`codec`)
proof  = `trainsync.weights.proof.record`
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch

from trainsync.storage.digest import format_digest, new_hasher
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.weights.buckets.layout import Bucket, StreamSchema
from trainsync.weights.delta.codec import Bytes, Segment, apply
from trainsync.weights.errors import DeltaError, DigestMismatchError, InconsistentUploadError
from trainsync.weights.transports.anchors.index import StoredObject

_ANCHOR: Final = struct.Struct("<4sQ")
_SEGMENT: Final = struct.Struct("<QQ")
_MAGIC: Final = b"tsa1"
_LARGEST_SCHEMA: Final = 256 << 20
_BLOCK: Final = 8 << 20

Check = Callable[[], None]
"""Called between the blocks of an object; what it raises ends the transfer."""


def put_anchor(
    bucket: ObjectBucket,
    key: str,
    schema: StreamSchema,
    data: torch.Tensor,
    check: Check = lambda: None,
) -> StoredObject:
    """Put a whole version.

    Args:
        data: uint8, on the CPU: the stream.

    Raises:
        StoreError: it could not be put.
    """
    described = schema.encode()
    head = _ANCHOR.pack(_MAGIC, len(described)) + described
    stream: memoryview = data.numpy().data
    blocks = [memoryview(head)]
    blocks += [stream[start : start + _BLOCK] for start in range(0, len(stream), _BLOCK)]
    return _put(bucket, key, blocks, check)


def put_delta(
    bucket: ObjectBucket, key: str, segments: Sequence[Segment], check: Check = lambda: None
) -> StoredObject:
    """Put what changed. Raises `StoreError`."""
    blocks: list[memoryview] = []
    for segment in segments:
        head = _SEGMENT.pack(segment.stop, segment.delta.size)
        blocks += [memoryview(head), segment.delta.data]
    return _put(bucket, key, blocks, check)


def put_proof(
    bucket: ObjectBucket, key: str, data: bytes, check: Check = lambda: None
) -> StoredObject:
    """Put a version's proof. Raises `StoreError`."""
    return _put(bucket, key, [memoryview(data)], check)


def _put(
    bucket: ObjectBucket, key: str, blocks: Sequence[memoryview], check: Check
) -> StoredObject:
    hasher, size = new_hasher(), sum(len(block) for block in blocks)

    def digested() -> Iterator[memoryview]:
        for block in blocks:
            check()
            hasher.update(block)
            yield block

    bucket.upload(key, digested(), size)
    return StoredObject(key, size, format_digest(hasher))


def read_whole(blocks: Iterable[bytes], stored: StoredObject, check: Check = lambda: None) -> Bytes:
    """The bytes of an object that fits into memory.

    Args:
        blocks: of its bytes, in order, such as `ObjectBucket.blocks` gives.

    Raises:
        DigestMismatchError: they are not those that were put.
        StoreError: they could not be read.
    """
    data = np.empty(stored.bytes, np.uint8)
    done = 0
    for block in blocks:
        check()
        if done + len(block) > data.size:
            raise DigestMismatchError(f"{stored.key} has more than {data.size} bytes")
        data[done : done + len(block)] = np.frombuffer(block, np.uint8)
        done += len(block)
    if (found := digest_of(data)) != stored.digest:
        raise DigestMismatchError(f"{stored.key} has digest {found}, expected {stored.digest}")
    return data


def digest_of(data: Bytes) -> str:
    """The digest of an object's bytes, as in `StoredObject`."""
    hasher = new_hasher()
    hasher.update(data.data)
    return format_digest(hasher)


class AnchorReading:
    """An anchor as it comes: first its schema, then the stream.

    Args:
        blocks: of its bytes, in order, such as `ObjectBucket.blocks` gives.

    Raises:
        InconsistentUploadError: it is no anchor, or not one of ``total`` bytes.
        StoreError: it could not be read.
    """

    def __init__(self, blocks: Iterable[bytes], stored: StoredObject, total: int) -> None:
        self._stored = stored
        self._blocks = iter(blocks)
        self._hasher = new_hasher()
        self._rest = b""
        magic, size = _ANCHOR.unpack(self._take(_ANCHOR.size))
        if magic != _MAGIC or size > _LARGEST_SCHEMA:
            raise InconsistentUploadError(f"{stored.key} is no whole version of weights")
        self.schema = StreamSchema.decode(self._take(size))
        if self.schema.total != total:
            raise InconsistentUploadError(
                f"{stored.key} describes {self.schema.total} bytes, expected {total}"
            )

    def into(self, target: Bytes, check: Check = lambda: None) -> None:
        """Read the stream. Raises `DigestMismatchError` and `StoreError`."""
        done = 0
        block = self._rest
        while True:
            part = np.frombuffer(block, np.uint8)
            if done + part.size > target.size:
                raise DigestMismatchError(f"{self._stored.key} is longer than its stream")
            target[done : done + part.size] = part
            done += part.size
            check()
            if (following := self._next()) is None:
                break
            block = following
        found = format_digest(self._hasher)
        if found != self._stored.digest or done != target.size:
            raise DigestMismatchError(
                f"{self._stored.key} has digest {found} and {done} bytes of weights, expected "
                f"{self._stored.digest} and {target.size}"
            )

    def _take(self, size: int) -> bytes:
        parts = [self._rest]
        while sum(map(len, parts)) < size:
            if (block := self._next()) is None:
                raise InconsistentUploadError(f"{self._stored.key} ends within its description")
            parts.append(block)
        data = b"".join(parts)
        self._rest = data[size:]
        return data[:size]

    def _next(self) -> bytes | None:
        block = next(self._blocks, None)
        if block is not None:
            self._hasher.update(block)
        return block


def apply_delta(data: Bytes, target: Bytes) -> None:
    """Change ``target``, which holds the base, to the next version. Raises `DeltaError`."""
    position = former = 0
    while position < data.size:
        if data.size - position < _SEGMENT.size:
            raise DeltaError("a stored delta ends within a segment")
        stop, size = _SEGMENT.unpack_from(data.data, position)
        position += _SEGMENT.size
        if not former < stop <= target.size or size > data.size - position:
            raise DeltaError(f"a stored delta has {size} bytes for what ends at {stop}")
        if size:
            apply(data[position : position + size], target)
        position, former = position + size, stop


def stream_digest(data: Bytes, plan: Sequence[Bucket]) -> str:
    """The digest of a version's stream, as `DeltaBase` and broadcasts have it."""
    hasher = new_hasher()
    for bucket in plan:
        hasher.update(data[bucket.start : bucket.stop].data)
    return format_digest(hasher)
