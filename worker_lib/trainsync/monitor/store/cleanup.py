"""Removes from a store what is over: records of ended saves, steps by retention, and orphans.

Objects of an incarnation that is not in force can go at once: it can commit nothing any more (see
`trainsync.storage.objects.live.term`). A copy's objects are left to ``trainsync checkpoints
prune``.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import CommittedInfo, SaveKey, SaveOwner
from trainsync.monitor.store.scan import records_of
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import parse_step
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import names, references
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.objects.live.term import Tenure
from trainsync.storage.saves.receipts import SaveOutcome
from trainsync.storage.saves.retention import choose_removals

_LOG: Final = logging.getLogger(__name__)


def end_save(bucket: ObjectBucket, tenure: Tenure, key: SaveKey, outcome: SaveOutcome) -> None:
    """Record how a save ended, for its participants, and remove what they said.

    Objects that the receipts of an aborted save have put go, too; not where the save is recorded to
    have been committed before: later steps may name them.

    Raises:
        TermLostError: another monitor commits by now, the aborted save perhaps: its objects stay.
    """
    records = records_of(bucket, key)
    failpoint("live.outcome")
    if outcome.error is not None:
        tenure.check()
    records.write_outcome(outcome)
    is_aborted = outcome.error is not None and _stands_as_aborted(records)
    if is_aborted:
        tenure.check()
    gone: list[str] = []
    for info in bucket.below(records.folder):
        rest = info.key.removeprefix(f"{records.folder}/")
        part = names.parse_participant(rest)
        if part is None:
            if names.is_pin(rest):
                gone.append(info.key)
            continue
        gone.append(info.key)
        if is_aborted and not part[1]:
            try:
                receipt = records.receipt(part[0])
            except DamagedFileError:
                continue  # its objects go with those of the attempt
            if receipt is not None:
                bucket.delete(sorted(names.own_shards(receipt).values()))
    bucket.delete(gone)


def _stands_as_aborted(records: StoredRecords) -> bool:
    """Whether no other outcome was recorded first."""
    try:
        first = records.outcome()
    except DamagedFileError:
        return False
    return first is None or first.error is not None


def forget_save(bucket: ObjectBucket, key: SaveKey) -> None:
    """Remove every record of a save that ended long ago."""
    bucket.delete([info.key for info in bucket.below(records_of(bucket, key).folder)])


def retain(
    bucket: ObjectBucket,
    tenure: Tenure,
    ledger: Ledger,
    keep: int,
    protected: set[int],
    doomed: dict[int, set[str]],
) -> list[int]:
    """Remove all but the last ``keep`` saves of each kind, in the order of training; the steps that
    are removed. A step stays where either kind keeps it.

    One whose objects a save may name that has not ended stays until then.

    Args:
        doomed: see `references.remove`; the same one when it is done again.

    Raises:
        TermLostError: another monitor commits by now; nothing was removed.
    """
    checkpoints, state_dicts = (
        [info.step for info in _as_trained(ledger, kind)]
        for kind in (SaveKind.CHECKPOINT, SaveKind.STATE_DICT)
    )
    steps = choose_removals(checkpoints, state_dicts, keep, protected)
    if not steps:
        return []
    # The right to remove; and what was about to be committed last must not be finished again.
    tenure.change(intent=None)
    gone = []
    left = {
        (info.step, kind)
        for kind in SaveKind
        for info in ledger.infos(kind)
        if info.step not in steps
    }
    for step in steps:
        failpoint("live.removing")
        if references.remove(bucket, step, doomed=doomed, may=tenure.check, also=left):
            gone.append(step)
    return gone


def readable(
    ledger: Ledger,
    now: datetime,
    reading_time: timedelta,
    heard: Mapping[tuple[int, SaveOwner], datetime],
) -> dict[int, datetime]:
    """Steps whose state dict a reader may be at, and until when: it was the newest one within
    ``reading_time``. Readers may not write into the store, so none says so.

    Args:
        heard: when state dicts were found committed, where that is known: a manifest says when it
            was made, and a store may have refused it since.
    """
    found = {}
    for one, newer in pairwise(_as_trained(ledger, SaveKind.STATE_DICT)):
        until = max(newer.time, heard.get((newer.step, newer.owner), newer.time)) + reading_time
        if now < until:
            found[one.step] = until
    return found


def _as_trained(ledger: Ledger, kind: SaveKind) -> list[CommittedInfo]:
    return sorted(ledger.infos(kind), key=lambda info: (info.age, info.step))


def sweep(bucket: ObjectBucket, ledger: Ledger, may: Callable[[], None]) -> bool:
    """Remove records and shards of incarnations that are not in force; whether that is done.

    It is not while a save that has not ended may name such shards: then shards stay; sweep again.
    Those of later attempts stay, too: this monitor may have been overtaken without knowing it. A
    step that is committed is looked at only where the ledger knows who committed it, so that the
    number of requests does not grow with the steps that are kept.

    Args:
        may: called before each removal; what it raises ends the sweep.

    Raises:
        StoreError: the store refuses.
    """
    newest = ledger.attempt
    if newest is None:
        return True
    in_force = {(owner.attempt, owner.incarnation) for owner in ledger.owners}

    def is_over(owner: tuple[int, str] | None) -> bool:
        return owner is not None and owner[0] <= newest and owner not in in_force

    def is_own(step: int) -> bool:
        info = ledger.info(SaveKind.CHECKPOINT, step)
        return info is not None and info.owner in ledger.owners

    for folder in bucket.folders(names.SAVES):
        if is_over(names.parse_owner(folder)):
            found = [info.key for info in bucket.below(folder)]
            may()
            bucket.delete(found)
    left = [
        found
        for found in _left(bucket, ledger, is_over).values()
        if not any(key.endswith(".damaged") for key in found)  # for people to look at
    ]
    if not left:
        return True
    objects = {key for found in left for key in found}
    known = {(info.step, kind) for kind in SaveKind for info in ledger.infos(kind)}
    known |= {(keys.step_of(key), kind) for kind in SaveKind for key in objects}
    try:
        # Others may be named by saves of other steps.
        unnamed = references.unnamed(bucket, objects, known, is_own)
    except DamagedFileError as error:
        _LOG.warning("no orphan is removed, since a manifest may name it: %s", error)
        return True
    if unnamed is None:
        return False
    failpoint("live.sweeping")
    for found in left:
        if gone := sorted(unnamed.intersection(found)):
            may()
            bucket.delete(gone)
    return True


def _left(
    bucket: ObjectBucket, ledger: Ledger, is_over: Callable[[tuple[int, str] | None], bool]
) -> dict[str, list[str]]:
    """Shards, by folder, that may be of no save: two listings."""
    found: dict[int, dict[str, list[str]]] = {}
    for info in bucket.below(keys.OBJECTS):
        parts = info.key.split("/")
        step = parse_step(parts[1]) if len(parts) > 3 else None
        if step is not None and is_over(names.parse_folder(folder := "/".join(parts[:3]))):
            found.setdefault(step, {}).setdefault(folder, []).append(info.key)
    committed = commits.committed_pairs(bucket)
    for step in {step for step, _ in committed}.intersection(found):
        infos = [ledger.info(kind, step) for one, kind in committed if one == step]
        owners = {(info.owner.attempt, info.owner.incarnation) for info in infos if info}
        if None in infos:
            del found[step]
        elif len(owners) == 1:  # of several one may have superseded what another one has put
            found[step] = {
                folder: there
                for folder, there in found[step].items()
                if names.parse_folder(folder) not in owners
            }
    return {folder: there for folders in found.values() for folder, there in folders.items()}
