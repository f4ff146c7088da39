"""Finds files of the checkpoint in a store that an attempt resumed from: what has not changed since
needs no upload after a restart, either.

The run's term names that checkpoint once a process has asked what to resume from.
"""

import threading
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.save.places.unchanged import KnownFile
from trainsync.storage import block_digests, digest
from trainsync.storage.errors import StepGoneError
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live.term import read_term
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.receipts import FileEntry

_KIND: Final = SaveKind.CHECKPOINT


class ResumedFiles:
    """The files of the checkpoint that an incarnation of an attempt resumed from; for all
    threads."""

    def __init__(self, attempt: int, incarnation: str) -> None:
        self._attempt = attempt
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._stored: Stored | None = None
        self._entries: dict[str, FileEntry] = {}

    def find(self, bucket: ObjectBucket, path: str) -> KnownFile | None:
        """The file at ``path``; None: the checkpoint has none with digests of its blocks, or the
        attempt began from nothing.

        Raises:
            StorageError: the store cannot be read, or holds what cannot be understood.
        """
        with self._lock:  # the first one reads it for all
            if self._stored is None and (stored := self._read(bucket)) is not None:
                self._stored = stored
                self._entries = {entry.path: entry for entry in stored.manifest.files}
            found = self._stored
        entry = self._entries.get(path)
        beside = self._entries.get(block_digests.beside(path))
        if found is None or entry is None or beside is None:
            return None
        data = bucket.get(found.keys[beside.path]).data
        hasher = digest.new_hasher()
        hasher.update(data)
        if digest.format_digest(hasher) != beside.digest:
            return None
        blocks = block_digests.decode(data, entry.bytes)
        if blocks is None:
            return None
        places = (found.keys[path], found.keys[beside.path])
        base = found.bases.get(path)
        return KnownFile(found.manifest.step, (entry, beside), places, blocks, found.digest, base)

    def _read(self, bucket: ObjectBucket) -> Stored | None:
        term = read_term(bucket)
        if term is None or term.attempt != self._attempt or term.origin is None:
            return None
        if self._incarnation not in term.clusters.values() or term.origin.step is None:
            return None
        try:
            stored = commits.read_manifest(bucket, _KIND, term.origin.step)
        except StepGoneError:
            return None
        return stored if stored.digest == term.origin.digest else None
