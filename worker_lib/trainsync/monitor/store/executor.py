"""Carries out the ledger's decisions on a store. Owned by `StoreCore`; see there for threads."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.monitor.commit.committer import info_of
from trainsync.monitor.commit.health import Unhealthy, VolumeHealth
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.ledger.decisions import AbortSave, CommitSave, VerifyReceipt
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import (
    AbortReason,
    CommittedInfo,
    Save,
    SaveKey,
    SaveOwner,
)
from trainsync.monitor.store import tidy
from trainsync.monitor.store.scan import RecordScan
from trainsync.storage.errors import DamagedFileError, PromotionConflictError, StepGoneError
from trainsync.storage.objects import commits, inspecting, keys, mending
from trainsync.storage.objects.bucket import Bucket
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError, StoreError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import Tenure, TermLostError
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.manifest import Committed, Manifest
from trainsync.storage.saves.receipts import (
    Participant,
    Receipt,
    SaveOutcome,
    SaveRegistration,
)

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.CHECKPOINT
OUTCOMES_KEPT: Final = 16
"""Ended saves whose outcome stays for participants that ask late."""
_READ_AT_REBUILD: Final = 64
"""Manifests that are read where all steps are kept: the older ones change nothing."""


@dataclass(frozen=True)
class _Prepared:
    """A save whose manifest may have been put."""

    manifest: Manifest
    receipts: tuple[Receipt, ...]
    registered_at: datetime

    @property
    def objects(self) -> dict[str, str]:
        """The key of each file's path."""
        return {path: key for part in self.receipts for path, key in names.shards(part).items()}


class StoreExecutor:
    """See the module's docstring. Every method may raise `TermLostError`.

    Args:
        max_to_keep: checkpoints; None keeps all.
        with_digest: whether every object is read before its save is committed.
        executor: where they are read; in the calling thread when None.
    """

    def __init__(
        self,
        bucket: Bucket,
        tenure: Tenure,
        ledger: Ledger,
        *,
        run_uid: str,
        max_to_keep: int | None,
        with_digest: bool,
        observer: Observer,
        clock: Callable[[], datetime],
        executor: Executor | None = None,
    ) -> None:
        self._bucket = bucket
        self._tenure = tenure
        self._empty_ledger = ledger.copy_empty
        self.ledger = ledger
        self._run_uid = run_uid
        self._max_to_keep = max_to_keep
        self._with_digest = with_digest
        self._observer = observer
        self._clock = clock
        self._executor = executor
        self._reading: dict[tuple[SaveKey, Participant], Future[str | None]] = {}
        self._scan = RecordScan(bucket)
        # What an intent may stand for: its manifest may be there, whatever is heard later.
        self._prepared: dict[SaveKey, _Prepared] = {}
        self._unclean: set[SaveKey] = set()
        self._ended: dict[SaveKey, None] = {}  # in the order in which they ended
        self._retention_due = True
        self._doomed: dict[int, set[str]] = {}  # see `references.remove`
        self.health = VolumeHealth(observer, Unhealthy.STORE)
        self.revision = 0
        self.also_kept: Callable[[], set[int]] = set
        """Steps that retention keeps, beside those that this executor knows of."""

    # Facts in.

    def rebuild(self) -> None:
        """Forget everything and learn it from the store.

        Raises:
            StoreError: it cannot be read; what was known stays.
        """
        ledger, scan = self._empty_ledger(), RecordScan(self._bucket)
        term = self._tenure.term
        if term.attempt is not None:
            for cluster, incarnation in sorted(term.clusters.items()):
                ledger.grant(cluster, SaveOwner(term.attempt, incarnation))
        steps = commits.known_steps(self._bucket, _KIND)
        if self._max_to_keep is None:
            steps = steps[-_READ_AT_REBUILD:]
        problems = []
        for step in steps:
            try:
                stored = commits.read_manifest(self._bucket, _KIND, step)
            except StepGoneError:
                continue
            except DamagedFileError as error:
                problems.append(str(error))
                continue
            ledger.committed(_KIND, self._info(stored))
        unclean = scan.into(ledger)
        self.ledger, self._scan, self._unclean = ledger, scan, unclean
        self.health.clear()
        if problems:
            self.health.found("manifests", "; ".join(problems))
        self._prepared.clear()
        self._reading.clear()
        self._ended.clear()
        self._retention_due = True
        self.revision += 1

    def scan(self) -> None:
        """Take what participants have put since. Raises `StoreError`."""
        self._unclean |= self._scan.into(self.ledger)
        self.health.solved("scan")

    def look(self, key: SaveKey, participant: Participant) -> None:
        """Take one receipt, if it is there. Raises `StoreError`."""
        self._scan.look(self.ledger, key, participant)

    def register(self, registration: SaveRegistration) -> Save:
        """See `Ledger.register`."""
        save = self.ledger.register(registration)
        self.revision += 1
        return save

    # Work.

    @property
    def busy(self) -> bool:
        """Whether objects are being read, or were, which `act` has not heard of."""
        return bool(self._reading)

    @property
    def has_news(self) -> bool:
        """Whether objects were read since `act`."""
        return any(reading.done() for reading in self._reading.values())

    def settle(self, now: datetime) -> None:
        """Commit what is complete before an attempt is superseded.

        Raises:
            StoreError: the store refused a commit; ask again.
        """
        while self._decide(now):
            pass
        self.act(now)

    def abandon(self, owner: SaveOwner, why: str, now: datetime) -> None:
        """Abort what the owner has not completed: it gives its attempt to its successor."""
        for save in self.ledger.saves():
            if save.open and save.key.owner == owner:
                self.ledger.fail(save.key, AbortReason.RESTARTED, why)
        self.act(now)

    def grant(self, cluster: str, owner: SaveOwner) -> None:
        """See `Ledger.grant`; the term says so already."""
        self.ledger.grant(cluster, owner)
        in_force = self.ledger.owners
        self._prepared = {k: v for k, v in self._prepared.items() if k.owner in in_force}
        self._reading = {k: v for k, v in self._reading.items() if k[0].owner in in_force}
        self._unclean = {key for key in self._unclean if key.owner in in_force}
        self.revision += 1

    def act(self, now: datetime) -> None:
        """Carry out decisions until none is left, then tidy. What the store refuses is kept for
        `health`, and done again with the next call."""
        try:
            while self._decide(now):
                pass
            self.health.solved("commit")
        except TermLostError:
            raise
        except StoreError as error:
            self.health.io_error("commit", str(error))
            return
        for doing, work in (("outcome", self._end_saves), ("retention", self._retain)):
            try:
                work()
                self.health.solved(doing)
            except TermLostError:
                raise
            except StoreError as error:
                self.health.io_error(doing, str(error))

    def _decide(self, now: datetime) -> bool:
        """Carry out what is decided now; whether anything changed."""
        changed = False
        sizes: dict[int, dict[str, int]] = {}  # of the objects of each step
        for decision in self.ledger.decisions(now):
            if isinstance(decision, VerifyReceipt):
                if not self._verify(decision, sizes):
                    continue
            elif isinstance(decision, CommitSave):
                self._commit(decision, now)
            elif decision.key in self._prepared:
                self._put(decision.key)
            else:
                self._abort(decision)
            changed = True
        return changed

    def _verify(self, todo: VerifyReceipt, sizes: dict[int, dict[str, int]]) -> bool:
        """Compare a receipt with its objects; False while they are read elsewhere."""
        which = (todo.key, todo.receipt.participant)
        reading = self._reading.get(which)
        if reading is not None:
            if not reading.done():
                return False
            del self._reading[which]
            problem = reading.result()
        else:
            problem = _size_problem(todo.receipt, partial(self._size, sizes))
            if problem is None and self._with_digest:
                if self._executor is not None:
                    read = self._executor.submit(_digest_problem, self._bucket, todo.receipt)
                    self._reading[which] = read
                    return False
                problem = _digest_problem(self._bucket, todo.receipt)
        if problem is None:
            self.ledger.verified(todo.key, todo.receipt)
        else:
            self.ledger.fail(todo.key, AbortReason.BAD_FILE, problem)
        return True

    def _size(self, sizes: dict[int, dict[str, int]], key: str) -> int | None:
        """Of an object, by a listing of all of its step; None where there is none.

        One that the listing lacks is asked for itself: listings may be late.
        """
        step = keys.step_of(key)
        if step not in sizes:
            listed = self._bucket.below(keys.step_objects(step))
            sizes[step] = {info.key: info.bytes for info in listed}
        if key not in sizes[step]:
            return self._bucket.size(key)
        return sizes[step][key]

    def _commit(self, commit: CommitSave, now: datetime) -> None:
        key = commit.key
        if (digest := self._committed_before(key)) is not None:
            self._end_committed(key, digest)
            return
        save = self.ledger.find(key)
        # The same manifest when it is put again: the first put may have been done.
        if key not in self._prepared:
            self._prepared[key] = _Prepared(
                Manifest(
                    kind=key.kind,
                    step=key.step,
                    attempt=key.owner.attempt,
                    incarnation=key.owner.incarnation,
                    run_uid=self._run_uid,
                    created_at=now,
                    participants=tuple(sorted(commit.registration.participants)),
                    files=commit.files,
                ),
                tuple(save.receipts.values()) if save is not None else (),
                commit.registration.created_at,
            )
        self._put(key)

    def _put(self, key: SaveKey) -> None:
        """Put the manifest of a save whose objects were verified, or find that it was put."""
        prepared = self._prepared[key]
        try:
            stored = self._tenure.commit(prepared.manifest, prepared.objects)
        except DamagedFileError as error:
            if not mending.finish_set_aside(self._bucket, key.kind, key.step):
                self._conflict(key, str(error))
            return  # else it is put by the next decision
        except PromotionConflictError as error:
            there = commits.read_manifest(self._bucket, key.kind, key.step)
            if (there.manifest.attempt, there.manifest.incarnation) != (
                key.owner.attempt,
                key.owner.incarnation,
            ):
                self._conflict(key, str(error))
                return
            stored = there  # by an intent of this very save, before a claim forgot it
        for part in prepared.receipts:
            self._observer.written(part)
        info = self._info(stored)
        self.ledger.committed(key.kind, info)
        seconds = (self._clock() - prepared.registered_at).total_seconds()
        self._observer.committed(key.kind, info, max(seconds, 0.0))
        _LOG.info("%s committed, %d bytes, %s", key, info.bytes, info.digest)
        self._ended_now(key)
        self._retention_due = True

    def _conflict(self, key: SaveKey, why: str) -> None:
        del self._prepared[key]  # another save is there, so this one's manifest never is
        self.ledger.fail(key, AbortReason.CONFLICT, why)

    def _committed_before(self, key: SaveKey) -> str | None:
        """Digest of the manifest by which another owner committed the step, if that is whole.

        One that is not is set aside, and the step is saved again.
        """
        info = self.ledger.info(key.kind, key.step)
        if info is None or info.owner == key.owner:
            return None
        try:
            stored = commits.read_manifest(self._bucket, key.kind, key.step)
        except StepGoneError:
            self.ledger.uncommitted(key.kind, key.step)
            return None
        problems = inspecting.size_findings(self._bucket, stored)
        if not problems:
            return stored.digest
        _LOG.warning("%s is committed but damaged, and is saved again: %s", key, problems[0])
        self._tenure.clear()  # or the next monitor puts it again
        mending.set_aside(self._bucket, stored)
        self.ledger.uncommitted(key.kind, key.step)
        return None

    def _abort(self, abort: AbortSave) -> None:
        key = abort.key
        if (digest := self._committed_before(key)) is not None:
            _LOG.warning("%s is committed already, although: %s", key, abort.cause.message)
            self._end_committed(key, digest)
            return
        save = self.ledger.find(key)
        for part in () if save is None else save.receipts.values():
            self._observer.written(part)
        self.ledger.aborted(key, abort.cause.message)
        self._observer.aborted(key, abort.cause)
        _LOG.warning("%s aborted: %s", key, abort.cause.message)
        self._ended_now(key)

    def _end_committed(self, key: SaveKey, digest: str) -> None:
        self.ledger.ended_committed(key, digest)
        self._ended_now(key)

    def _ended_now(self, key: SaveKey) -> None:
        self._prepared.pop(key, None)
        self._reading = {which: read for which, read in self._reading.items() if which[0] != key}
        self._unclean.add(key)
        self.revision += 1

    # What comes after.

    def _end_saves(self) -> None:
        for key in sorted(self._unclean):
            save = self.ledger.find(key)
            if save is not None and not save.open:
                is_committed = save.state is SaveState.COMMITTED
                tidy.end_save(
                    self._bucket,
                    self._tenure,
                    key,
                    SaveOutcome(
                        kind=key.kind,
                        step=key.step,
                        error=None if is_committed else save.error or "",
                        manifest_digest=save.manifest_digest if is_committed else None,
                    ),
                )
            self._unclean.discard(key)
        ended = {save.key: None for save in self.ledger.saves() if not save.open}
        self._ended = {key: None for key in self._ended if key in ended} | ended
        for key in list(self._ended)[:-OUTCOMES_KEPT]:
            tidy.forget_save(self._bucket, key)
            self.ledger.forget([key])
            del self._ended[key]

    def _retain(self) -> None:
        if not self._retention_due or self._max_to_keep is None:
            return
        protected = {save.key.step for save in self.ledger.saves() if save.open}
        protected |= self.also_kept()
        newest = self.ledger.newest(_KIND)
        if newest is not None:
            protected.add(newest.step)
        origin = self._tenure.term.origin
        # Until the attempt has a checkpoint of its own it may resume from there once more.
        own = any(info.owner in self.ledger.owners for info in self.ledger.infos(_KIND))
        if origin is not None and origin.step is not None and not own:
            protected.add(origin.step)
        removed = tidy.retain(
            self._bucket, self._tenure, self.ledger, self._max_to_keep, protected, self._doomed
        )
        for step in removed:
            self.ledger.uncommitted(_KIND, step)
            _LOG.info("step %d removed: at most %s are kept", step, self._max_to_keep)
        self._retention_due = False

    def _info(self, stored: Stored) -> CommittedInfo:
        return info_of(Committed(stored.manifest, stored.digest), self._run_uid)


def _size_problem(receipt: Receipt, size_of: Callable[[str], int | None]) -> str | None:
    objects = names.shards(receipt)
    for entry in receipt.files:
        key = objects[entry.path]
        if (size := size_of(key)) != entry.bytes:
            there = "is missing" if size is None else f"has {size} bytes"
            return f"{key} {there}, expected {entry.bytes} bytes"
    return None


def _digest_problem(bucket: Bucket, receipt: Receipt) -> str | None:
    objects = names.shards(receipt)
    for entry in receipt.files:
        key = objects[entry.path]
        try:
            found = inspecting.read_digest(bucket, key, entry.bytes)
        except (ObjectMissingError, ObjectChangedError) as error:
            return str(error)
        if found != entry.digest:
            return f"{key} has digest {found}, expected {entry.digest}"
    return None
