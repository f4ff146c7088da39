"""The files of a checkpoint in a store: read by the rank that needs them. Needs no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from trainsync.storage import digest
from trainsync.storage.objects import parts
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreError
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.saves.based import Base
from trainsync.storage.saves.receipts import FileEntry


@dataclass(frozen=True)
class StoredFiles:
    """The objects of a checkpoint in the store of ``url``: the key of each file's path, and of a
    file of which that object has a part, where the rest is.

    A copy in another process opens the store by that process's environment.
    """

    url: str
    keys: Mapping[str, str] = field(repr=False)
    bases: Mapping[str, Base] = field(default_factory=dict, repr=False, kw_only=True)

    @classmethod
    def named_by(cls, url: str, stored: Stored) -> "StoredFiles":
        """Those that a manifest names."""
        return StoredFiles(url, dict(stored.keys), bases=dict(stored.bases))

    def blocks(self, entry: FileEntry) -> Iterator[bytes]:
        """The bytes of a file, which are compared with the manifest when all have come.

        Raises:
            StoreError: the object is gone, or the store cannot be read.
            DifferentBytesError: it is not what the manifest says.
        """
        hasher = digest.new_hasher()
        key, base = self.keys[entry.path], self.bases.get(entry.path)
        for block in parts.read_blocks(self._store(), key, entry.bytes, base):
            hasher.update(block)
            yield block
        found = digest.format_digest(hasher)
        if found != entry.digest:
            raise DifferentBytesError(
                f"{self.name(entry)} has digest {found}, expected {entry.digest}"
            )

    def range(self, entry: FileEntry, start: int, end: int) -> memoryview:
        """The bytes of a file from ``start`` on, before ``end``; not compared with anything.

        Raises:
            StoreError: the object is gone, has another size, or the store cannot be read.
        """
        key, base = self.keys[entry.path], self.bases.get(entry.path)
        return parts.read_range(self._store(), key, entry.bytes, base, start, end)

    @property
    def part_bytes(self) -> int:
        """How many bytes are asked for at once."""
        return self._store().limits.part_bytes

    def name(self, entry: FileEntry) -> str:
        """A file's URL, for messages."""
        return f"{self.url}/{self.keys[entry.path]}"

    def read(self, entry: FileEntry) -> bytes:
        """The bytes of a small file. Raises as `blocks`."""
        return b"".join(self.blocks(entry))

    def _store(self) -> ObjectBucket:
        return _open(self.url)


@dataclass(frozen=True)
class OpenedFiles(StoredFiles):
    """Those of a store that is open already, for this process alone."""

    bucket: ObjectBucket = field(repr=False, compare=False)

    @classmethod
    def of(cls, bucket: ObjectBucket, stored: Stored) -> "OpenedFiles":
        """Those that a manifest names."""
        return cls(bucket.name, stored.keys, bucket, bases=stored.bases)

    def _store(self) -> ObjectBucket:
        return self.bucket


class DifferentBytesError(StoreError):
    """A file's bytes are not those of the manifest."""


@lru_cache(8)
def _open(url: str) -> ObjectBucket:
    return open_run_store(url)
