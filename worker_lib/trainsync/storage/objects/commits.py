"""Commits in a store: manifests, each put once, and pointers, which only a repair moves back.

A manifest takes the place of a mark, which has reserved its key just before (`reserve`). Were it
put where nothing is (`If-None-Match: *`), a put that is on its way for long would succeed, too,
once another process had committed the step and removed it: a committed save without its objects.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.storage.errors import DamagedFileError, PromotionConflictError, StepGoneError
from trainsync.storage.layout import MAX_STEP
from trainsync.storage.objects import keys, manifests
from trainsync.storage.objects.bucket import Blob, ObjectBucket
from trainsync.storage.objects.errors import (
    ObjectChangedError,
    ObjectExistsError,
    StoreUnavailableError,
)
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.based import Base
from trainsync.storage.saves.manifest import Manifest

_POINTER_TRIES: Final = 8
_MAX_DIGITS: Final = 100  # Python refuses to read numbers of thousands of digits


def committed_steps(bucket: ObjectBucket, kind: SaveKind) -> list[int]:
    """Steps of which a save of ``kind`` is committed, in order. One request for each thousand."""
    found = (
        keys.parse_manifest(kind, info.key)
        for info in bucket.objects(keys.manifests(kind))
        if info.bytes != manifests.RESERVED_BYTES
    )
    return sorted(step for step in found if step is not None)


def is_committed(bucket: ObjectBucket, kind: SaveKind, step: int) -> bool:
    """Whether a save of ``kind`` is committed at ``step``; without a listing, which may be late."""
    return bucket.size(keys.manifest(kind, step)) not in (None, manifests.RESERVED_BYTES)


def known_steps(bucket: ObjectBucket, kind: SaveKind) -> list[int]:
    """`committed_steps`, and the step that the pointer names where a listing that is late lacks it.

    So an attempt resumes from the newest commit also where listings are not consistent.
    """
    steps = committed_steps(bucket, kind)
    try:
        named = read_pointer(bucket, kind)
    except DamagedFileError:
        return steps  # it is repaired by what is listed
    if named is None or named in steps or not is_committed(bucket, kind, named):
        return steps
    return sorted([*steps, named])


def committed_pairs(bucket: ObjectBucket, step: int | None = None) -> list[tuple[int, SaveKind]]:
    """(step, kind) of every save, damaged ones too, or of those at ``step``; in order."""
    return sorted(
        (there, kind)
        for kind in SaveKind
        for there in committed_steps(bucket, kind)
        if step in (None, there)
    )


def read_manifest(bucket: ObjectBucket, kind: SaveKind, step: int) -> Stored:
    """The save of ``kind`` at ``step``.

    Raises:
        StepGoneError: there is none.
        DamagedFileError: it cannot be understood.
    """
    there = bucket.find(keys.manifest(kind, step))
    if there is None or manifests.is_reserved(there.data):
        raise StepGoneError(f"{kind.value} {step} is not committed in {bucket.name}")
    return manifests.decode(there.data, kind, step)


def reserve(bucket: ObjectBucket, kind: SaveKind, step: int) -> Blob:
    """Have a mark of this call's own at the key of a manifest, unless a save is committed there;
    what is there then, in whose place alone `commit` puts the manifest.

    Marks that others have put are replaced, so that no manifest which is on its way to take the
    place of one comes there any more. A mark that is left counts for nothing, and gives way to the
    next save of its step. Raises `StoreError`; ask again.
    """
    key, mark = keys.manifest(kind, step), manifests.new_mark()
    try:
        bucket.create(key, mark)
    except ObjectExistsError:
        there = bucket.get(key)
        if not manifests.is_reserved(there.data):
            return there
        bucket.replace(key, mark, there)
    failpoint("store.reserved")
    return bucket.get(key)


def commit(
    bucket: ObjectBucket,
    manifest: Manifest,
    objects: dict[str, str],
    *,
    bases: Mapping[str, Base] | None = None,
    there: Blob | None = None,
    repair: bool = False,
    supersede: bool = False,
) -> Stored:
    """Commit a save whose objects are all there, and let the pointer follow.

    The manifest is the commit point. A save that another process has committed meanwhile is as
    good, if it is the same.

    Args:
        objects: the key of each file's path.
        bases: see `Stored`.
        there: what `reserve` gave, if it was asked; with a right to commit that may be lost, the
            caller has seen since that it has it.
        repair: whether a pointer that cannot be read is replaced; the store is this process's own.
        supersede: whether it takes the place of what an older attempt committed at its step, whose
            objects then are nobody's.

    Returns what is committed, whose objects may be another process's.

    Raises:
        PromotionConflictError: another save is committed at its step.
        DamagedFileError: what is there cannot be understood.
        StoreUnavailableError: another process puts or removes it just now; ask again.
    """
    data = manifests.encode(manifest, objects, bases)
    stored = manifests.decode(data, manifest.kind, manifest.step)
    failpoint("store.uploaded")
    if there is None:
        there = reserve(bucket, manifest.kind, manifest.step)
    if not _put(bucket, manifest, data, there, supersede=supersede):
        stored = read_manifest(bucket, manifest.kind, manifest.step)
        check_same(bucket.name, stored.manifest, manifest)
    failpoint("store.manifest")
    move_pointer(bucket, manifest.kind, manifest.step, repair=repair)
    failpoint("store.pointer")
    return stored


def _put(
    bucket: ObjectBucket, manifest: Manifest, data: bytes, there: Blob, *, supersede: bool
) -> bool:
    """Put ``data`` in the place of ``there``; False: a save is committed there, and stays."""
    if not manifests.is_reserved(there.data):
        old = manifests.decode(there.data, manifest.kind, manifest.step).manifest
        if not supersede or old.age(manifest.run_uid) >= manifest.age(manifest.run_uid):
            return False
        failpoint("store.superseding")
    key = keys.manifest(manifest.kind, manifest.step)
    try:
        bucket.replace(key, data, there)
    except ObjectChangedError as error:
        if not supersede and is_committed(bucket, manifest.kind, manifest.step):
            return False
        raise StoreUnavailableError(f"{bucket.name}: another process replaces {key}") from error
    return True


def check_same(where: str, there: Manifest, wanted: Manifest) -> None:
    """See that two manifests of one step are of the same save.

    Raises:
        PromotionConflictError: they are not.
    """
    if there != wanted:
        raise PromotionConflictError(
            f"{wanted.kind.value} {wanted.step} in {where} is another save, of attempt "
            f"{there.attempt} of run {there.run_uid} ({there.created_at:%Y-%m-%d %H:%M:%S} UTC), "
            "and stays"
        )


def read_pointer(bucket: ObjectBucket, kind: SaveKind) -> int | None:
    """The step that the pointer names; None when there is no pointer.

    Raises:
        DamagedFileError: it does not hold a step.
    """
    found = bucket.find(keys.pointer(kind))
    return None if found is None else step_in(found, kind)


def move_pointer(bucket: ObjectBucket, kind: SaveKind, step: int, *, repair: bool = False) -> bool:
    """Name ``step``, unless a newer one is named; whether it moved.

    Raises:
        DamagedFileError: the present pointer cannot be read; it stays, unless ``repair``.
        StoreUnavailableError: others move it all the time.
    """
    key, data = keys.pointer(kind), f"{step}\n".encode()
    for _ in range(_POINTER_TRIES):
        there = bucket.find(key)
        try:
            if there is None:
                bucket.create(key, data)
                return True
            try:
                named = step_in(there, kind)
            except DamagedFileError:
                if not repair:
                    raise
                named = -1
            if named >= step:
                return False
            bucket.replace(key, data, there)
        except (ObjectExistsError, ObjectChangedError):
            continue  # another writer was faster: what it named decides
        return True
    raise StoreUnavailableError(f"{bucket.name}: other writers move {key} all the time")


def replace_pointer(bucket: ObjectBucket, kind: SaveKind, step: int, old: Blob | None) -> bool:
    """Name ``step``, also an older one, in place of the pointer that `ObjectBucket.find` gave.

    Returns:
        Whether that pointer was still there.
    """
    key, data = keys.pointer(kind), f"{step}\n".encode()
    try:
        if old is None:
            bucket.create(key, data)
        else:
            bucket.replace(key, data, old)
    except (ObjectExistsError, ObjectChangedError):
        return False
    return True


def step_in(found: Blob, kind: SaveKind) -> int:
    """The step that a pointer's object names. Raises `DamagedFileError`."""
    text = found.data[: _MAX_DIGITS + 2].decode("ascii", errors="replace").strip()
    if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) > MAX_STEP:
        raise DamagedFileError(Path(keys.pointer(kind)), f"holds {text[:40]!r}, expected a step")
    return int(text)
