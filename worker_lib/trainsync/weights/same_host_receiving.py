"""The explorer's end of memory that it shares with the trainer."""

from collections.abc import Callable
from pathlib import Path

import xxhash

from trainsync.weights.buckets import StreamSchema, plan_buckets
from trainsync.weights.errors import SharedMemoryError
from trainsync.weights.link import Frame
from trainsync.weights.segment_store import read_probe, segment_path
from trainsync.weights.served import StagingSet, views_of
from trainsync.weights.shared_segment import map_segment


class SameHostReceiving:
    """Maps what the trainer has written. One thread.

    Args:
        memory: the memory file system; None: everything comes over the wire.
        phase: see `BroadcastHooks`.
    """

    def __init__(self, memory: Path | None, phase: Callable[[str], None]) -> None:
        self._memory = memory
        self._phase = phase
        self._failed = ""  # a trainer's memory that is seen here but cannot be mapped

    def probe(self, frame: Frame) -> str | None:
        """The proof that the memory which a ``prepare`` frame names is seen here; None if not."""
        folder = frame.get("memory")
        if self._memory is None or not isinstance(folder, str) or folder == self._failed:
            return None
        return read_probe(self._memory, folder)

    def receive(self, frame: Frame, schema: StreamSchema) -> tuple[StagingSet, str]:
        """The set that a ``receive`` frame points to, and the digest of its bytes.

        They cannot change from before they are looked at until the last tensor is gone.

        Raises:
            SharedMemoryError: it cannot be had. This trainer's versions come over the wire then.
        """
        if self._memory is None:
            raise SharedMemoryError("the trainer points to memory, and none is shared")
        name = str(frame["segment"])
        try:
            data = map_segment(segment_path(self._memory, name), schema.total)
        except SharedMemoryError:
            self._failed = name.partition("/")[0]
            raise
        hasher = xxhash.xxh3_128()
        for bucket in plan_buckets(schema, int(frame["bucket_size"])):
            hasher.update(data[bucket.start : bucket.stop].numpy().data)
            self._phase("bucket")
        return views_of(schema, data, ours=False), f"xxh3-128:{hasher.hexdigest()}"
