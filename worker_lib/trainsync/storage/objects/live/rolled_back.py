"""Going back to an older checkpoint of a store: the request, and the later steps out of the way.

As on a volume (`trainsync.storage.saves.rollback`), whose record it is. No object moves: manifests
go from ``manifests/`` to ``rolled_back/``, so that their steps count no more, and the objects that
they name stay where they are, for as long as a manifest there names them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError, StoreUnavailableError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.manifests import SET_ASIDE, is_mark
from trainsync.storage.saves import rollback
from trainsync.storage.saves.rollback import Rollback

_KIND: Final = SaveKind.CHECKPOINT


def read(bucket: ObjectBucket, run_uid: str) -> Rollback | None:
    """The newest request of the run ``run_uid``; None: nothing was asked.

    Raises:
        DamagedFileError: it cannot be understood.
        StoreError: the store cannot be read.
    """
    blob = bucket.find(names.ROLLBACK)
    if blob is None:
        return None
    found = rollback.decode(blob.data, Path(names.ROLLBACK))
    return found if found.run_uid == run_uid else None


def write(bucket: ObjectBucket, record: Rollback, may: Callable[[], None]) -> None:
    """Replace the record, if ``may``, asked right before, raises nothing.

    Raises:
        StoreError: the store refuses, or another monitor has put a record meanwhile.
    """
    there, data = bucket.find(names.ROLLBACK), rollback.encode(record)
    may()
    if there is None:
        bucket.create(names.ROLLBACK, data)
    else:
        bucket.replace(names.ROLLBACK, data, there)


def forget(bucket: ObjectBucket) -> None:
    """The request is withdrawn. Raises `StoreError`."""
    bucket.delete([names.ROLLBACK])


def put_aside(bucket: ObjectBucket, record: Rollback, may: Callable[[], None]) -> tuple[int, ...]:
    """Move the manifests of the steps after the record's aside; the steps that lie there, in order.

    Pointers go back first, so that they name something at every moment. It can be done again.
    A manifest that cannot be understood goes aside, too: while it lies there no object is removed.

    Args:
        may: asked before each change; what it raises stops that.

    Raises:
        StoreError: the store refuses, or another monitor does the same; do it again, if this one is
            still in charge.
    """
    assert record.folder is not None, "an accepted rollback has a folder"
    for kind in SaveKind:
        steps = commits.committed_steps(bucket, kind)
        _put_pointer_back(bucket, kind, record.step, steps, may)
        for step in reversed(steps):
            if step <= record.step:
                break
            failpoint("live.rolling_back")
            may()
            _put_aside(bucket, kind, step, keys.rolled_back(record.folder, kind, step), may)
    found = (
        keys.parse_rolled_back(info.key)
        for info in bucket.below(f"{keys.ROLLED_BACK}/{record.folder}")
    )
    return tuple(sorted({parsed[1] for parsed in found if parsed is not None}))


def _put_pointer_back(
    bucket: ObjectBucket, kind: SaveKind, step: int, steps: list[int], may: Callable[[], None]
) -> None:
    """Name the newest of ``steps`` up to ``step``. Of state dicts there may be none: then the
    pointer goes."""
    left = [one for one in steps if one <= step]
    target = step if kind is _KIND else max(left, default=None)
    pointer = bucket.find(keys.pointer(kind))
    if pointer is None and target is None:
        return
    may()
    if target is None:
        bucket.delete([keys.pointer(kind)])
    elif not commits.replace_pointer(bucket, kind, target, pointer):
        raise StoreUnavailableError(f"{bucket.name}: another writer moves the pointer")


def _put_aside(
    bucket: ObjectBucket, kind: SaveKind, step: int, aside: str, may: Callable[[], None]
) -> None:
    """Move the manifest of a step.

    Unlike `trainsync.storage.objects.repair.set_aside`, never delete ``aside``: two monitors of
    one roll-back have one key for it, and a manifest too many there only keeps objects.
    """
    key = keys.manifest(kind, step)
    there = bucket.find(key)
    if there is None:
        return
    if not is_mark(there.data):
        bucket.create(aside, there.data)
        failpoint("live.rolled_aside")
        try:
            bucket.replace(key, SET_ASIDE, there)
        except ObjectChangedError as error:
            text = f"{bucket.name}: another monitor has changed {key} meanwhile"
            raise StoreUnavailableError(text) from error
        failpoint("live.rolled_marked")
    # Once another monitor has ended the mark, the step may be saved again.
    may()
    bucket.delete([key])


def is_aside(bucket: ObjectBucket, step: int) -> bool:
    """Whether any rollback has put ``step`` aside. Raises `StoreError`."""
    found = (keys.parse_rolled_back(info.key) for info in bucket.below(keys.ROLLED_BACK))
    return (_KIND, step) in found
