"""A store as a place: objects under keys of this writer's own, then manifest and pointer."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.api.words import counted
from trainsync.failpoints import failpoint
from trainsync.storage.copying.places import Block, Reading, Writing
from trainsync.storage.errors import FileCheckError, StepGoneError
from trainsync.storage.objects import commits, inspecting, keys, parts
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import (
    ObjectChangedError,
    ObjectMissingError,
    StoreUnavailableError,
)
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.objects.probe import require_conditional_puts
from trainsync.storage.objects.removal import LONGEST_COPY_SECONDS
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry

# Counts on while the machine is suspended, where the system has such a clock.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class StoreSource:
    """Saves of a store. Nothing keeps one there while it is read: if it goes, reading fails."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket
        self.name = bucket.name

    def kinds(self, step: int) -> list[SaveKind]:
        """See `Source`."""
        return [kind for _, kind in commits.committed_pairs(self._bucket, step)]

    @contextmanager
    def reading(self, kind: SaveKind, step: int) -> Iterator[Reading]:
        """See `Source`."""
        yield _StoreReading(self._bucket, commits.read_manifest(self._bucket, kind, step))


class _StoreReading:
    def __init__(self, bucket: ObjectBucket, stored: Stored) -> None:
        self._bucket = bucket
        self._stored = stored

    @property
    def manifest(self) -> Manifest:
        return self._stored.manifest

    def blocks(self, entry: FileEntry) -> Iterator[Block]:
        try:
            yield from parts.read_blocks(
                self._bucket,
                self._stored.keys[entry.path],
                entry.bytes,
                self._stored.bases.get(entry.path),
            )
        except (ObjectMissingError, ObjectChangedError) as error:
            found = self._stored.manifest
            now = commits.read_manifest(self._bucket, found.kind, found.step)
            if now.digest != self._stored.digest:
                raise StepGoneError(f"{error}: the save was replaced while it was read") from error
            raise FileCheckError(str(error)) from error


class StoreDestination:
    """A store that takes saves."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket
        self.name = bucket.name

    @contextmanager
    def open(self) -> Iterator[None]:
        """See `Destination`. Others need not be kept off: their keys are others."""
        require_conditional_puts(self._bucket)
        yield

    def find(self, manifest: Manifest) -> str | None:
        """See `Destination`."""
        try:
            stored = commits.read_manifest(self._bucket, manifest.kind, manifest.step)
        except StepGoneError:
            return None
        commits.check_same(self.name, stored.manifest, manifest)
        problems = inspecting.size_findings(self._bucket, stored)
        if problems:
            raise FileCheckError(
                f"{manifest.kind.value} {manifest.step} is in {self.name}, but damaged "
                f"({problems[0]}): prune the step there, and copy it again"
            )
        commits.move_pointer(self._bucket, manifest.kind, manifest.step)
        return stored.digest

    def writing(self, manifest: Manifest) -> Writing:
        """See `Destination`."""
        return _StoreWriting(self._bucket, manifest)


class _StoreWriting:
    def __init__(self, bucket: ObjectBucket, manifest: Manifest) -> None:
        self._bucket = bucket
        self._manifest = manifest
        self._folder = keys.writer_objects(
            manifest.step, manifest.attempt, manifest.incarnation, secrets.token_hex(8)
        )
        self._keys = {
            entry.path: keys.shard(self._folder, number, entry.path)
            for number, entry in enumerate(manifest.files)
        }
        self._began = time.clock_gettime(_CLOCK)

    def has(self, entry: FileEntry) -> bool:
        del entry  # an earlier copy's keys are others
        return False

    def put(self, entry: FileEntry, blocks: Iterator[Block]) -> None:
        self._bucket.upload(self._keys[entry.path], blocks, entry.bytes)
        failpoint("store.object")

    def commit(self) -> str:
        took = time.clock_gettime(_CLOCK) - self._began
        if took > LONGEST_COPY_SECONDS:
            raise StoreUnavailableError(
                f"{self._bucket.name}: the copy took {took / 3600:.0f} hours, longer than the "
                f"{counted(round(LONGEST_COPY_SECONDS / 3600), 'hour')} in which objects without a "
                "manifest are safe from prune; nothing was committed"
            )
        # If another copy of it was faster, these objects wait for prune: a put of the manifest
        # whose reply was lost may yet come to the store.
        return commits.commit(self._bucket, self._manifest, self._keys).digest
