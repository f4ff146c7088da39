"""Going back to an older checkpoint of a store: the request, and the later steps out of the way.

As on a volume (`trainsync.storage.saves.rollback`), whose record it is. No object moves: manifests
go from ``manifests/`` to ``rolled_back/``, so that their steps count no more, and the objects that
they name stay where they are, for as long as a manifest there names them.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects import commits, keys, manifests, mending
from trainsync.storage.objects.bucket import Bucket
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names
from trainsync.storage.saves import rollback
from trainsync.storage.saves.rollback import Rollback

_LOG: Final = logging.getLogger(__name__)
_KIND: Final = SaveKind.CHECKPOINT


def read(bucket: Bucket, run_uid: str) -> Rollback | None:
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


def write(bucket: Bucket, record: Rollback, may: Callable[[], None]) -> None:
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


def forget(bucket: Bucket) -> None:
    """The request is withdrawn. Raises `StoreError`."""
    bucket.delete([names.ROLLBACK])


def put_aside(bucket: Bucket, record: Rollback, may: Callable[[], None]) -> tuple[int, ...]:
    """Move the manifests of the steps after the record's aside; the steps that lie there, in order.

    The pointer goes back first, so that it names something at every moment. It can be done again.
    A manifest that cannot be understood stays: a newer release may have written it.

    Args:
        may: asked before each change; what it raises stops that.

    Raises:
        StoreError: the store refuses; do it again.
    """
    assert record.folder is not None, "an accepted rollback has a folder"
    pointer = bucket.find(keys.pointer(_KIND))
    may()
    if not commits.replace_pointer(bucket, _KIND, record.step, pointer):
        raise StoreUnavailableError(f"{bucket.name}: another writer moves the pointer")
    for step in reversed(commits.committed_steps(bucket, _KIND)):
        if step <= record.step:
            break
        failpoint("live.rolling_back")
        may()
        key = keys.manifest(_KIND, step)
        there = bucket.find(key)
        if there is None or mending.finish_set_aside(bucket, _KIND, step):
            continue
        try:
            manifests.decode(there.data, _KIND, step)
        except DamagedFileError as error:
            _LOG.warning("%s: it is not set aside", error)
            continue
        mending.move_aside(bucket, key, there, keys.rolled_back(record.folder, _KIND, step))
    return tuple(
        sorted(
            parsed[1]
            for info in bucket.below(f"{keys.ROLLED_BACK}/{record.folder}")
            if (parsed := keys.parse_rolled_back(info.key)) is not None
        )
    )


def is_aside(bucket: Bucket, step: int) -> bool:
    """Whether any rollback has put ``step`` aside. Raises `StoreError`."""
    found = (keys.parse_rolled_back(info.key) for info in bucket.below(keys.ROLLED_BACK))
    return (_KIND, step) in found
