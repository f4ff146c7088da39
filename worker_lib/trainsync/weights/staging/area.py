"""The writer of staged versions: a process beside the inference server, or the server's own."""

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

from trainsync.failpoints import failpoint
from trainsync.storage import atomic
from trainsync.storage.digest import format_digest, manifest_digest
from trainsync.weights.buckets.layout import StreamSchema
from trainsync.weights.buckets.served import views_of
from trainsync.weights.errors import DigestMismatchError, SharedMemoryError
from trainsync.weights.staging.draft import has_draft
from trainsync.weights.staging.index import (
    StagedIndex,
    StagedReference,
    encode_index,
    index_name,
)
from trainsync.weights.transports.base import meta_of
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY
from trainsync.weights.transports.shared_memory.segment_store import SegmentStore


class StagingArea:
    """A folder of shared memory that holds one version, and those that are read. One thread.

    The next version takes the memory of the last one, unless a server reads it: then it takes more.
    The folder goes with `close`; that of a process that died goes when the next area is made.

    Args:
        memory: the memory file system; servers must see it under `TRAINSYNC_STAGING_MEMORY`, and
            run as the same user.

    Attributes:
        memory: that file system.

    Raises:
        SharedMemoryError: it cannot be written to.
    """

    def __init__(self, memory: Path = SHARED_MEMORY) -> None:
        self.memory = memory
        self._store = SegmentStore(memory, 0)
        self._indexes: list[Path] = []
        self._staged_bytes: int | None = None

    def room_beside(self, size: int) -> int:
        """Bytes that are free besides what the next version needs; below 0: it may not fit.

        Args:
            size: of the version, about, while none was staged: then as many as the last one had.
        """
        return self._store.room_beside(self._staged_bytes or size)

    def stage(
        self, version: int, tensors: Mapping[str, torch.Tensor], digest: str | None = None
    ) -> StagedReference:
        """Copy a version into shared memory, digest the copy, and write its index.

        Args:
            version: the trainer's global step.
            tensors: full tensors under the names of the model's checkpoint, on any device.
            digest: that the copy must have (`StagedIndex.digest`); None: any.

        Raises:
            SharedMemoryError: there is no room.
            DigestMismatchError: the copy is not what was expected.
        """
        schema = StreamSchema(tuple(meta_of(*named) for named in tensors.items()))
        segment = self._store.acquire(schema.total)
        copies = views_of(schema, segment.data).tensors
        hasher = xxhash.xxh3_128()
        for name, tensor in tensors.items():
            copies[name].copy_(tensor.detach())
            hasher.update(copies[name].reshape(-1).view(torch.uint8).numpy().data)
            failpoint("stage.tensor")
        found = format_digest(hasher)
        if digest is not None and found != digest:
            raise DigestMismatchError(f"version {version} has digest {found}, expected {digest}")
        for old in self._indexes:
            if not old.with_suffix("").exists():  # a later version has its memory
                old.unlink(missing_ok=True)
        share = self._store.share(segment)
        self._store.publish(segment)
        self._staged_bytes = schema.total
        rows = tuple((t.name, t.dtype, t.itemsize, t.shape) for t in schema.tensors)
        data = encode_index(StagedIndex(version, share, schema.total, found, rows))
        path = self.memory / index_name(share)
        self._indexes = [*(old for old in self._indexes if old.exists()), path]
        try:
            atomic.write_bytes(path, data, durably=False)
        except OSError as error:
            raise SharedMemoryError(f"{path} cannot be written: {error.strerror}") from error
        return StagedReference(index_name(share), manifest_digest(data), draft=has_draft(tensors))

    def close(self) -> None:
        """Remove the folder. A server that reads a version goes on reading it."""
        self._store.close()
