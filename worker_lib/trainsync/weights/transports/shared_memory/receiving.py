"""The explorer's end of memory that it shares with the trainer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import Bucket, StreamSchema, plan_buckets
from trainsync.weights.buckets.served import StagingSet, views_of
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.transports.broadcast.link import Frame
from trainsync.weights.transports.shared_memory.segment import SegmentGoneError
from trainsync.weights.transports.shared_memory.segment_reader import SegmentReader
from trainsync.weights.transports.shared_memory.segment_store import read_probe, segment_path

Whole = tuple[StagingSet, str]
"""A version that is all there, and the digest of its bytes."""


@dataclass
class _Arriving:
    """A version that the trainer is laying, as far as it was looked at."""

    version: int
    schema: StreamSchema
    data: torch.Tensor
    left: list[Bucket]  # not looked at yet, the first one last
    hasher: Any


class SharedMemoryReceiver:
    """Maps what the trainer lays there. One thread.

    Args:
        memory: the memory file system; None: everything comes over the wire.
    """

    def __init__(self, memory: Path | None) -> None:
        self._memory = memory
        self._reader = SegmentReader()
        self._failed = ""  # a trainer's memory that is seen here but cannot be mapped
        self._arriving: _Arriving | None = None

    def probe(self, frame: Frame) -> str | None:
        """The proof that the memory which a ``prepare`` frame names is seen here; None if not."""
        self._reader.forget_removed()  # a trainer that died may have left them
        folder = frame.get("memory")
        if self._memory is None or not isinstance(folder, str) or folder == self._failed:
            return None
        return read_probe(self._memory, folder)

    def begin(self, frame: Frame, schema: StreamSchema) -> Whole | None:
        """Map what a ``receive`` frame points to. From now on no other version is begun there.

        Returns as `take` does.

        Raises:
            SegmentGoneError: the frame came too late. The next version comes this way again.
            SharedMemoryError: it cannot be mapped. Versions come over the chain then.
        """
        if self._memory is None:
            raise SharedMemoryError("the trainer points to memory, and none is shared")
        name = str(frame["segment"])
        try:
            data = self._reader.map(segment_path(self._memory, name), schema.total)
        except SegmentGoneError:
            raise
        except SharedMemoryError:
            self._failed = name.partition("/")[0]
            raise
        plan = plan_buckets(schema, int(frame["bucket_size"]))
        self._arriving = _Arriving(
            int(frame["version"]), schema, data, plan[::-1], xxhash.xxh3_128()
        )
        return self._whole(self._arriving)

    def take(self, frame: Frame) -> Whole | None:
        """Look at what a ``laid`` frame tells of: the set and its digest when all of it is there.

        The bytes that were looked at do not change before the last tensor of the set is gone.
        """
        arriving = self._arriving
        if arriving is None or arriving.version != int(frame["version"]):
            return None  # it could not be mapped
        stop = int(frame["stop"])
        while arriving.left and arriving.left[-1].stop <= stop:
            bucket = arriving.left.pop()
            arriving.hasher.update(arriving.data[bucket.start : bucket.stop].numpy().data)
            failpoint("receive.bucket")
        return self._whole(arriving)

    def drop(self) -> None:
        """Let go of a version that has not come whole."""
        self._arriving = None

    def _whole(self, arriving: _Arriving) -> Whole | None:
        if arriving.left:
            return None
        self._arriving = None
        staged = views_of(arriving.schema, arriving.data, ours=False)
        return staged, f"xxh3-128:{arriving.hasher.hexdigest()}"
