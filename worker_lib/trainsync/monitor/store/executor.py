"""Carries out the ledger's decisions on a store. Owned by `StoreCore`; see there for threads."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
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
from trainsync.monitor.store import cleanup, origin
from trainsync.monitor.store.retention import StoreRetention
from trainsync.monitor.store.scan import RecordScan
from trainsync.monitor.store.verifier import ObjectSizes, StoreVerifier
from trainsync.storage.errors import DamagedFileError, PromotionConflictError, StepGoneError
from trainsync.storage.objects import commits, inspecting, repair
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreError
from trainsync.storage.objects.live import names, references
from trainsync.storage.objects.live.term import Tenure, TermLostError
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.based import Base
from trainsync.storage.saves.manifest import Committed, Manifest
from trainsync.storage.saves.receipts import (
    Participant,
    Receipt,
    SaveOutcome,
    SaveRegistration,
)

_LOG = logging.getLogger(__name__)
OUTCOMES_KEPT: Final = 16
"""Ended saves of each kind whose outcome stays for participants that ask late."""
_READ_AT_REBUILD: Final = 64
"""Manifests that are read where all steps are kept: the older ones change nothing."""


@dataclass(frozen=True)
class _Prepared:
    """A save whose manifest may have been put."""

    manifest: Manifest
    objects: dict[str, str]
    """The key of each file's path."""
    bases: dict[str, Base]
    """See `Stored`."""
    receipts: tuple[Receipt, ...]
    registered_at: datetime


class StoreExecutor:
    """See the module's docstring. Every method may raise `TermLostError`.

    Args:
        max_to_keep: saves of each kind; None keeps all.
        with_digest: whether every object is read before its save is committed.
        reading_seconds: a state dict stays so long after a newer one is committed: a reader that
            has no right to say so may be at it.
        executor: where they are read; in the calling thread when None.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        tenure: Tenure,
        ledger: Ledger,
        *,
        run_uid: str,
        max_to_keep: int | None,
        with_digest: bool,
        reading_seconds: float,
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
        self._observer = observer
        self._clock = clock
        self._verifier = StoreVerifier(bucket, executor, with_digest=with_digest)
        self.retention = StoreRetention(
            bucket,
            tenure,
            max_to_keep=max_to_keep,
            reading_seconds=reading_seconds,
            clock=clock,
        )
        self._scan = RecordScan(bucket)
        # What an intent may stand for: its manifest may be there, whatever is heard later.
        self._prepared: dict[SaveKey, _Prepared] = {}
        self._unclean: set[SaveKey] = set()
        self._ended: dict[SaveKey, None] = {}  # in the order in which they ended
        self.has_superseded = False
        """Whether objects of older attempts lost their manifest: `cleanup.sweep` removes them."""
        self._compared: tuple[tuple[str, str], bool] | None = None  # two manifests: same weights?
        self.health = VolumeHealth(observer, Unhealthy.STORE)
        self.revision = 0

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
        problems = []
        began = None if term.origin is None else term.origin.step
        for kind in SaveKind:
            left = _READ_AT_REBUILD
            for step in reversed(commits.known_steps(self._bucket, kind)):
                if self._max_to_keep is None and left == 0:
                    break
                try:
                    stored = commits.read_manifest(self._bucket, kind, step)
                except StepGoneError:
                    continue
                except DamagedFileError as error:
                    problems.append(str(error))
                    continue
                info = self._info(stored)
                ledger.committed(kind, info)
                # Before the attempt's own state dicts may come many that it has not superseded yet.
                is_later = kind is SaveKind.STATE_DICT and began is not None and step > began
                left -= info.owner in ledger.owners or not is_later
        unclean = scan.into(ledger)
        self.ledger, self._scan, self._unclean = ledger, scan, unclean
        self.health.clear()
        if problems:
            self.health.found("manifests", "; ".join(problems))
        self._prepared.clear()
        self._verifier.clear()
        self._ended.clear()
        self.retention.begin(ledger)
        self.revision += 1

    def scan(self) -> None:
        """Take what participants have put since. Raises `StoreError`."""
        self._unclean |= self._scan.into(self.ledger)
        self.health.solved("scan")

    def look(self, key: SaveKey, participant: Participant) -> None:
        """Take one receipt, if it is there. Raises `StoreError`."""
        self._scan.look(self.ledger, key, participant)

    def register(self, registration: SaveRegistration) -> Save:
        """See `Ledger.register`. Raises `StorageError`."""
        save = self.ledger.register(registration)
        is_open = save.open and save.key.kind is SaveKind.STATE_DICT
        if is_open and (digest := self._committed_before(save.key)) is not None:
            self._end_committed(save.key, digest)  # its participants need not write it then
        self.revision += 1
        return save

    def weights_of(self, step: int) -> CommittedInfo | None:
        """The state dict with the weights of the checkpoint of ``step``; None: there is none.

        Raises:
            StorageError: a manifest cannot be read.
        """
        info = self.ledger.info(SaveKind.STATE_DICT, step)
        checkpoint = self.ledger.info(SaveKind.CHECKPOINT, step)
        if info is None or checkpoint is None or info.age >= checkpoint.age:
            return info
        # One from before the checkpoint's attempt may be of other weights than those.
        compared = (info.digest, checkpoint.digest)
        if self._compared is None or self._compared[0] != compared:
            self._compared = compared, origin.same_weights(self._bucket, step)
        return info if self._compared[1] else None

    # Work.

    @property
    def busy(self) -> bool:
        """Whether objects are being read, or were, which `act` has not heard of."""
        return self._verifier.busy

    @property
    def has_news(self) -> bool:
        """Whether objects were read since `act`."""
        return self._verifier.has_news

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
        self._verifier.keep(in_force)
        self._unclean = {key for key in self._unclean if key.owner in in_force}
        self.revision += 1

    def act(self, now: datetime) -> None:
        """Carry out decisions until none is left, then clean up. What the store refuses is kept for
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
        for doing, work in (
            ("outcome", self._end_saves),
            ("retention", partial(self.retention.run, self.ledger, now)),
        ):
            try:
                work()
                self.health.solved(doing)
            except TermLostError:
                raise
            except StoreError as error:
                self.health.io_error(doing, str(error))
                # No step goes before it is recorded that its save was committed: else the next
                # monitor would abort that, with objects that later steps name.
                return

    def _decide(self, now: datetime) -> bool:
        """Carry out what is decided now; whether anything changed."""
        changed = False
        sizes = ObjectSizes(self._bucket)
        for decision in self.ledger.decisions(now):
            if isinstance(decision, VerifyReceipt):
                verdict = self._verifier.verify(decision.key, decision.receipt, sizes)
                if verdict is None:
                    continue
                if verdict.problem is None:
                    self.ledger.verified(decision.key, decision.receipt)
                else:
                    self.ledger.fail(decision.key, AbortReason.BAD_FILE, verdict.problem)
            elif isinstance(decision, CommitSave):
                self._commit(decision, now)
            elif decision.key in self._prepared:
                self._put(decision.key)
            else:
                self._abort(decision)
            changed = True
        return changed

    def _commit(self, commit: CommitSave, now: datetime) -> None:
        key = commit.key
        if (digest := self._committed_before(key)) is not None:
            self._end_committed(key, digest)
            return
        # The same manifest when it is put again: the first put may have been done.
        if key not in self._prepared:
            prepared = self._prepare(commit, now)
            if prepared is None:
                return
            self._prepared[key] = prepared
        self._put(key)

    def _prepare(self, commit: CommitSave, now: datetime) -> _Prepared | None:
        """None: the state dict whose files it reuses is gone, and the save fails."""
        key, registration = commit.key, commit.registration
        save = self.ledger.find(key)
        parts = tuple(save.receipts.values()) if save is not None else ()
        files = {entry.path: entry for entry in commit.files}
        objects = {path: key for part in parts for path, key in names.shards(part).items()}
        bases = {path: rest for part in parts for path, rest in part.based.items()}
        if registration.reuse_state_dict:
            try:
                base = commits.read_manifest(self._bucket, SaveKind.STATE_DICT, key.step)
            except (StepGoneError, DamagedFileError) as error:
                self.ledger.fail(key, AbortReason.CONFLICT, str(error))
                return None
            files = {entry.path: entry for entry in base.manifest.files} | files
            objects = dict(base.keys) | objects
        manifest = Manifest(
            kind=key.kind,
            step=key.step,
            attempt=key.owner.attempt,
            incarnation=key.owner.incarnation,
            run_uid=self._run_uid,
            created_at=now,
            participants=tuple(sorted(registration.participants)),
            files=tuple(sorted(files.values())),
        )
        return _Prepared(manifest, objects, bases, parts, registration.created_at)

    def _put(self, key: SaveKey) -> None:
        """Put the manifest of a save whose objects were verified, or find that it was put."""
        prepared = self._prepared[key]
        try:
            stored = self._tenure.commit(prepared.manifest, prepared.objects, prepared.bases)
        except DamagedFileError as error:
            if not repair.finish_set_aside(self._bucket, key.kind, key.step):
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
        before = self.ledger.info(key.kind, key.step)
        self.has_superseded |= before is not None and before.owner != key.owner
        self.ledger.committed(key.kind, info)
        self.retention.committed(key.kind, info)
        seconds = (self._clock() - prepared.registered_at).total_seconds()
        self._observer.committed(key.kind, info, max(seconds, 0.0))
        _LOG.info("%s committed, %d bytes, %s", key, info.bytes, info.digest)
        self._ended_now(key)

    def _conflict(self, key: SaveKey, why: str) -> None:
        del self._prepared[key]  # another save is there, so this one's manifest never is
        self.ledger.fail(key, AbortReason.CONFLICT, why)

    def _committed_before(self, key: SaveKey) -> str | None:
        """Digest of the manifest by which another owner committed the step, if that is whole.

        One that is not is set aside, and the step is saved again. None also of an older attempt's
        state dict, whose place the owner's takes, unless it has the weights that the owner resumed
        from.
        """
        info = self.ledger.info(key.kind, key.step)
        if info is None or info.owner == key.owner:
            return None
        if key.kind is SaveKind.STATE_DICT and info.age < key.owner.age:
            began = self._tenure.term.origin
            if began is None or began.step != key.step or self.weights_of(key.step) is None:
                return None
        try:
            stored = commits.read_manifest(self._bucket, key.kind, key.step)
        except StepGoneError:
            self.ledger.uncommitted(key.kind, key.step)
            return None
        problems = inspecting.size_findings(self._bucket, stored)
        if not problems:
            return stored.digest
        if key.kind is SaveKind.CHECKPOINT and key.step in references.pinned(self._bucket):
            _LOG.warning("%s stays, as a save may name its objects: %s", key, problems[0])
            return None  # so the save fails, and the next one of its step may succeed
        _LOG.warning("%s is committed but damaged, and is saved again: %s", key, problems[0])
        self._tenure.clear()  # or the next monitor puts it again
        repair.set_aside(self._bucket, stored)
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
        self._verifier.forget(key)
        self._unclean.add(key)
        self.revision += 1

    # What comes after.

    def _end_saves(self) -> None:
        for key in sorted(self._unclean):
            save = self.ledger.find(key)
            if save is not None and not save.open:
                is_committed = save.state is SaveState.COMMITTED
                cleanup.end_save(
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
        for kind in SaveKind:
            for key in [key for key in self._ended if key.kind is kind][:-OUTCOMES_KEPT]:
                cleanup.forget_save(self._bucket, key)
                self.ledger.forget([key])
                del self._ended[key]

    def _info(self, stored: Stored) -> CommittedInfo:
        return info_of(Committed(stored.manifest, stored.digest), self._run_uid)
