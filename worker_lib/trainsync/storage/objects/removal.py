"""Removes saves from a store, and the objects of copies that were cut off.

A manifest goes first: the save is uncommitted at once. What a crash leaves then is objects that no
manifest names, as of a copy that was killed; they go when they are old enough. A copy at work has
such objects, too: so it commits only within `LONGEST_COPY_SECONDS` of its beginning, by its own
clock, and its objects are safe for `ORPHAN_SECONDS`, by the store's. No two clocks are compared.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import DamagedFileError, StepGoneError
from trainsync.storage.inspect.pointers import newest_valid
from trainsync.storage.inspect.saves import as_trained
from trainsync.storage.objects import commits, inspecting, keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.inspecting import StoredSave
from trainsync.storage.objects.live import references
from trainsync.storage.saves.retention import choose_removals

LONGEST_COPY_SECONDS: Final = 24 * 3600.0
ORPHAN_SECONDS: Final = 48 * 3600.0


@dataclass(frozen=True)
class Orphans:
    """Objects of a writer that committed none of them."""

    step: int
    folder: str
    keys: tuple[str, ...]
    bytes: int

    def to_json_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {"step": self.step, "folder": self.folder, "bytes": self.bytes}


def choose(bucket: ObjectBucket, found: Sequence[StoredSave], keep: int) -> list[int]:
    """Steps to remove, oldest first.

    Besides the last ``keep`` of each kind, in the order of training, stay: what the pointers name,
    and the newest save of each kind that is whole.

    Raises:
        ValueError: ``keep`` is less than 1.
    """
    saves = [one.save for one in found]
    records = [save.committed.manifest for save in saves if save.committed]
    uid = max(records, key=lambda record: record.created_at).run_uid if records else ""
    whole = (newest_valid(saves, kind) for kind in SaveKind)
    protected = {step for step in whole if step is not None}
    protected |= set(inspecting.targets(bucket).values())
    bad = {
        kind: {save.step for save in saves if save.kind is kind and not save.valid}
        for kind in SaveKind
    }
    return choose_removals(
        as_trained(saves, SaveKind.CHECKPOINT, uid),
        as_trained(saves, SaveKind.STATE_DICT, uid),
        keep,
        protected,
        bad_checkpoints=bad[SaveKind.CHECKPOINT],
        bad_state_dicts=bad[SaveKind.STATE_DICT],
    )


def remove(bucket: ObjectBucket, step: int, found: Sequence[StoredSave]) -> bool:
    """Remove a step's saves, and the objects that they alone name; whether it is gone.

    It stays when a pointer names it by now, when it is another save than the one in ``found``, and
    while a save that has not ended may name its objects.

    Args:
        found: all saves of the store.
    """
    mine = [one for one in found if one.save.step == step]
    if step in inspecting.targets(bucket).values():
        return False
    if not all(_is_unchanged(bucket, one) for one in mine):
        return False
    bucket.delete([keys.manifest(one.save.kind, step) for one in mine if one.stored is None])
    return references.remove(bucket, step, partial(_limit, bucket, None))


def orphans(bucket: ObjectBucket, clock: Callable[[], datetime] | None = None) -> list[Orphans]:
    """Objects that no manifest names and that are old enough to be of no copy at work.

    None where a manifest cannot be understood, or while a save that has not ended, or that is
    committed meanwhile, may name objects of older steps: it may be any of them.

    Args:
        clock: gives the store's time; `store_time` when absent.
    """
    seen = inspecting.unlisted(bucket, [])
    if not seen:
        return []
    listed = {folder: bucket.below(folder) for _, folder in seen}
    limit = _limit(bucket, clock)
    old = {
        (step, folder)
        for step, folder in seen
        if all(info.modified < limit for info in listed[folder])
    }
    if not old:
        return []
    # After the listing, and pins before manifests: what was committed until now is known.
    if references.pinned(bucket, lambda: limit):
        return []
    committed = set(commits.committed_pairs(bucket))
    try:
        named = {keys.folder_of(key) for key in references.named(bucket)}
    except DamagedFileError:
        return []
    if references.pinned(bucket, lambda: limit):  # put while manifests were read
        return []
    if not committed.issuperset(commits.committed_pairs(bucket)):  # and ended by now
        return []
    return [
        Orphans(
            step,
            folder,
            tuple(info.key for info in listed[folder]),
            sum(info.bytes for info in listed[folder]),
        )
        for step, folder in sorted(old)
        if folder not in named
    ]


def remove_orphans(bucket: ObjectBucket, found: Sequence[Orphans]) -> None:
    """Remove what `orphans` found."""
    for one in found:
        bucket.delete(one.keys)


def old_probes(bucket: ObjectBucket, clock: Callable[[], datetime] | None = None) -> list[str]:
    """Keys of objects that a writer put to try the store, and was killed before it removed them."""
    there = bucket.objects(keys.PROBES)
    if not there:
        return []
    limit = _limit(bucket, clock)
    return [info.key for info in there if info.modified < limit]


def store_time(bucket: ObjectBucket) -> datetime:
    """The time by the clock of the store, which is told by a put."""
    key = f"{keys.PROBES}/{secrets.token_hex(8)}"
    bucket.create(key, b"")
    try:
        return max(info.modified for info in bucket.objects(keys.PROBES))
    finally:
        bucket.delete([key])


def _limit(bucket: ObjectBucket, clock: Callable[[], datetime] | None) -> datetime:
    now = store_time(bucket) if clock is None else clock()
    return now - timedelta(seconds=ORPHAN_SECONDS)


def _is_unchanged(bucket: ObjectBucket, one: StoredSave) -> bool:
    try:
        now = commits.read_manifest(bucket, one.save.kind, one.save.step)
    except StepGoneError:
        return True
    except DamagedFileError:
        return one.stored is None
    return one.stored is not None and now.digest == one.stored.digest
