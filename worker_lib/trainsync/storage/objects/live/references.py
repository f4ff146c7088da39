"""References that keep an object in a store: of manifests that name it, also of those that a
roll-back has set aside, and of saves that are about to.

A save may name objects of an older step, whose files have not changed since. So no object goes only
because its own step does; and no clock and no lock is needed, but this order:

- A writer puts a *pin* on the committed step that it found the objects in, and looks after that
  whether the step is still committed. If not, it writes its files in full.
- To remove a step, its manifest is removed first; then pins are listed, and its objects stay if one
  is on a step that is not committed, as this one; then all manifests are read, and pins are listed
  once more, and manifests that came meanwhile read; then the objects that none of them names are
  removed.
- A pin is removed when its save has ended: if it was committed, its manifest was put before.

So whichever comes second, a pin or a removal, sees the other one, also where two monitors are at
work, or one of them is killed in between.

An object may be named by saves of attempts after the one that put it. So the sweep of what those
that are over have left waits for pins, too: for each that is on a step of another incarnation.
"""

import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.storage import digest
from trainsync.storage.errors import DamagedFileError, UnsafePathError
from trainsync.storage.objects import commits, keys, manifests
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import names
from trainsync.storage.saves.receipts import Participant, Receipt

_LOG = logging.getLogger(__name__)
_AT_ONCE: Final = 16
_TRIES: Final = 5


def pin(
    bucket: ObjectBucket,
    folder: str,
    step: int,
    participant: Participant,
    manifest: str | None = None,
) -> bool:
    """Keep the objects of ``step`` until the save whose records are in ``folder`` has ended.

    False when the step is not committed any more: its objects may be gone. Raises `StoreError`.

    Args:
        manifest: its digest, of a step that another attempt may have committed anew; None: the
            writer's own attempt has committed it.
    """
    bucket.create(names.pin(folder, step, participant), b"")
    failpoint("live.pinned")
    if manifest is None:
        return commits.is_committed(bucket, SaveKind.CHECKPOINT, step)
    there = bucket.find(keys.manifest(SaveKind.CHECKPOINT, step))
    return there is not None and digest.manifest_digest(there.data) == manifest


def pinned(bucket: ObjectBucket, since: Callable[[], datetime] | None = None) -> set[int]:
    """Steps whose objects saves that have not ended may name. Raises `StoreError`.

    Args:
        since: asked if there is a pin: older ones do not count, by the clock of the store, as no
            save takes so long, and a run that was killed leaves some; None: all count.
    """
    pins = [
        (step, info.modified)
        for info in bucket.below(names.SAVES)
        if (step := names.parse_pin(info.key)) is not None
    ]
    limit = since() if pins and since is not None else None
    return {step for step, put in pins if limit is None or put >= limit}


def named(bucket: ObjectBucket, also: Collection[tuple[int, SaveKind]] = ()) -> set[str]:
    """Keys of all objects that manifests name.

    Args:
        also: saves whose manifests are asked for though a listing, which may be late, lacks them.

    Raises:
        DamagedFileError: a manifest cannot be understood: it may name any object.
        StoreError: the store cannot be read.
    """
    return _read_all(bucket, also)[0]


def _read_all(
    bucket: ObjectBucket, also: Collection[tuple[int, SaveKind]]
) -> tuple[set[str], set[tuple[int, SaveKind]]]:
    """See `named`; with them the saves whose manifests were listed."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="trainsync-manifests") as pool:
        for _ in range(_TRIES):
            wanted = commits.committed_pairs(bucket)
            found = list(pool.map(lambda pair: _named_by(bucket, *pair), wanted))
            there = [objects for objects in found if objects is not None]
            if len(there) == len(found):
                # After the others: what was set aside since they were listed is listed now.
                late = set(also).difference(wanted)
                more = pool.map(lambda pair: _named_by(bucket, *pair) or set(), late)
                return rolled_back(bucket).union(*there, *more), set(wanted)
            # What is gone may have been superseded by a save that was not listed yet.
    raise DamagedFileError(
        Path(keys.manifests(SaveKind.CHECKPOINT)), "manifests go as they are read"
    )


def unnamed(
    bucket: ObjectBucket,
    objects: Collection[str],
    also: Collection[tuple[int, SaveKind]] = (),
    is_sure: Callable[[int], bool] = lambda step: True,
    since: Callable[[], datetime] | None = None,
) -> set[str] | None:
    """Those of ``objects`` that no manifest names, and that no save which has not ended may name.
    None: such a save may name some that no manifest names; ask again when it has ended.

    Args:
        also: see `named`.
        is_sure: whether a step that is committed and pinned is the one that was pinned.
        since: see `pinned`.

    Raises:
        As `named`.
    """
    before = pinned(bucket, since)
    keys_named, read = _read_all(bucket, also)
    found = set(objects) - keys_named
    if not found:
        return found
    # Pins are listed once more, and commits last: one that was put meanwhile is on a step which
    # had its manifest when the others were read, or is seen to have none; or it is gone, and the
    # save that had it is committed by now.
    pins = before | pinned(bucket, since)
    pairs = set(commits.committed_pairs(bucket))
    for pair in pairs - read:
        more = _named_by(bucket, *pair)
        if more is None:
            return None  # and what has removed it may have been followed by another one
        found -= more
    there = {step for step, kind in pairs if kind is SaveKind.CHECKPOINT}
    return found if all(step in there and is_sure(step) for step in pins) else None


def rolled_back(bucket: ObjectBucket) -> set[str]:
    """Keys of objects that manifests name which roll-backs have set aside. Raises as `named`."""
    wanted = [
        (info.key, parsed)
        for info in bucket.below(keys.ROLLED_BACK)
        if (parsed := keys.parse_rolled_back(info.key)) is not None
    ]

    def read(one: tuple[str, tuple[SaveKind, int]]) -> set[str]:
        blob = bucket.find(one[0])
        if blob is None:
            return set()
        try:
            return set(manifests.decode(blob.data, *one[1]).objects)
        except DamagedFileError as error:
            raise DamagedFileError(Path(one[0]), error.why) from error

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="trainsync-manifests") as pool:
        return set().union(*pool.map(read, wanted))


def remove(
    bucket: ObjectBucket,
    step: int,
    since: Callable[[], datetime] | None = None,
    doomed: dict[int, set[str]] | None = None,
    may: Callable[[], None] = lambda: None,
    also: Collection[tuple[int, SaveKind]] = (),
) -> bool:
    """Remove the saves of ``step``, manifests first, and the objects that no other save names;
    whether the step is gone.

    It stays where a manifest of it cannot be understood, and while a save that has not ended may
    name its objects. Where another manifest cannot be understood, or such a save began meanwhile,
    the objects stay, for the sweep of the next attempt. Raises `StoreError`.

    Args:
        since: see `pinned`.
        doomed: objects by step, where the store failed after the manifests were removed, which name
            them no more; the same one when it is done again.
        may: called right before manifests and before objects are removed; its exception prevents
            that.
        also: see `named`.
    """
    if step in pinned(bucket, since):
        return False
    doomed = {} if doomed is None else doomed
    there: list[str] = []
    objects = doomed.setdefault(step, set())
    for kind in SaveKind:
        key = keys.manifest(kind, step)
        blob = bucket.find(key)
        if blob is None:
            continue
        try:
            if not manifests.is_reserved(blob.data):
                objects |= manifests.decode(blob.data, kind, step).objects
        except DamagedFileError:
            return False  # a person's, or a newer release's
        there.append(key)
    may()
    bucket.delete(there)
    failpoint("live.uncommitted")
    # A pin on a step that is gone, this one or another, may be of objects that this one names, too.
    try:
        gone = unnamed(bucket, objects, also, since=since)
    except DamagedFileError as error:
        _LOG.warning("objects of step %d stay, which this manifest may name: %s", step, error)
    else:
        if gone is not None:
            failpoint("live.unnamed")
            may()
            bucket.delete(sorted(gone))
    del doomed[step]
    return True


def _named_by(bucket: ObjectBucket, step: int, kind: SaveKind) -> set[str] | None:
    """None: it is gone since it was listed."""
    blob = bucket.find(keys.manifest(kind, step))
    if blob is None:
        return None
    if manifests.is_mark(blob.data):
        return set()
    return set(manifests.decode(blob.data, kind, step).objects)


def check_older(record: str, receipt: Receipt) -> None:
    """See that what a receipt names of older steps was put for steps before its own.

    Raises:
        DamagedFileError: it was not; or it speaks of other files, or is of another version.
    """
    where = Path(record)
    try:
        for key in receipt.kept.values():
            if keys.step_of(key) >= receipt.step:
                raise UnsafePathError(f"names {key!r}, which was not put for an older step")
        if lacks := receipt.based.keys() - {entry.path for entry in receipt.files}:
            raise ValueError(f"has a base of {min(lacks)!r}, which it does not list")
        for entry in receipt.files:  # a forged one may list a path twice
            if (base := receipt.based.get(entry.path)) is not None:
                manifests.check_base(base, entry.bytes, receipt.step)
    except (UnsafePathError, ValueError) as error:
        raise DamagedFileError(where, str(error)) from error
    if bool(receipt.based) is not (receipt.version == 2):
        raise DamagedFileError(where, f"is of version {receipt.version}, with other fields")
