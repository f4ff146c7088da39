"""Stores in memory, and saves in them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from obstore.store import MemoryStore
from trainsync.api.protocol import SaveKind
from trainsync.storage import digest
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry, Participant

CHECKPOINT = SaveKind.CHECKPOINT
STATE_DICT = SaveKind.STATE_DICT
DAY = datetime(2026, 1, 1, tzinfo=UTC)


def memory(store: Any = None) -> ObjectBucket:
    return ObjectBucket(MemoryStore() if store is None else store, "memory://", Limits())


def manifest_of(
    step: int, data: bytes = b"data", kind: SaveKind = CHECKPOINT, attempt: int = 0
) -> Manifest:
    hasher = digest.new_hasher()
    hasher.update(data)
    entry = FileEntry("actor/rank_0.pt", len(data), digest.format_digest(hasher))
    return Manifest(
        kind=kind,
        step=step,
        attempt=attempt,
        incarnation="aaaaaaaa",
        run_uid="uid",
        created_at=DAY + timedelta(minutes=step),
        participants=(Participant("model", 0),),
        files=(entry,),
    )


def save(
    bucket: ObjectBucket, manifest: Manifest, data: bytes = b"data", writer: str = "w1"
) -> None:
    """Put the objects, and commit."""
    folder = keys.writer_objects(manifest.step, manifest.attempt, manifest.incarnation, writer)
    key = keys.shard(folder, 0, manifest.files[0].path)
    bucket.upload(key, iter([data]), len(data))
    commits.commit(bucket, manifest, {manifest.files[0].path: key})
