"""Staged versions as a server's worker reads them: mapped read-only, never copied or unpickled."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import xxhash

from trainsync.api import env
from trainsync.storage.digest import format_digest
from trainsync.weights.buckets.served import views_of
from trainsync.weights.errors import DigestMismatchError
from trainsync.weights.staging.index import StagedIndex, StagedReference, read_index
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY
from trainsync.weights.transports.shared_memory.segment_reader import SegmentReader
from trainsync.weights.transports.shared_memory.segment_store import segment_path

MEMORY_VARIABLE: Final = env.STAGING_MEMORY
"""Names the memory file system to a server; ``/dev/shm`` without."""


@dataclass(frozen=True)
class StagedVersion:
    """One version. Its memory takes no other version before the last of its tensors is gone.

    Attributes:
        tensors: full tensors in the index's order; to write to one ends the process.
    """

    index: StagedIndex
    tensors: Mapping[str, torch.Tensor]

    def check(self) -> None:
        """Digest all bytes.

        Raises:
            DigestMismatchError: they are not those that were staged.
        """
        hasher = xxhash.xxh3_128()
        for tensor in self.tensors.values():
            hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        found = format_digest(hasher)
        if found != self.index.digest:
            raise DigestMismatchError(
                f"version {self.index.weight_version} has digest {found} in {self.index.segment}, "
                f"expected {self.index.digest}"
            )


class StagedReader:
    """Maps staged versions. One thread.

    Args:
        memory: the memory file system; None: as the environment says.

    Attributes:
        memory: the memory file system.
    """

    def __init__(self, memory: Path | None = None) -> None:
        self.memory = memory or Path(os.environ.get(MEMORY_VARIABLE) or SHARED_MEMORY)
        self._reader = SegmentReader()

    def open(self, reference: StagedReference) -> StagedVersion:
        """Map a version, without reading its bytes.

        Raises:
            SegmentGoneError: it is not there (any more).
            DigestMismatchError: its index is not the one that was referred to.
            SharedMemoryError: its index or memory cannot be read, or contradict each other.
            InconsistentUploadError: a dtype is unknown here.
        """
        index = read_index(self.memory, reference)
        data = self._reader.map(segment_path(self.memory, index.segment), index.bytes)
        return StagedVersion(index, views_of(index.schema, data, ours=False).tensors)
