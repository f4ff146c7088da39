"""Carries out the ledger's decisions: checks, commits and aborts, with bounded retries.

Owned by `MonitorCore`; see there for threads.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.monitor.commit import already_committed
from trainsync.monitor.commit.backoff import CommitBackoff
from trainsync.monitor.commit.cleanup import Cleanup
from trainsync.monitor.commit.committer import Committer, Stamps, info_of, read_committed
from trainsync.monitor.commit.health import Unhealthy, VolumeHealth
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.commit.removal import Removal
from trainsync.monitor.commit.scan import StagingScan, drop_withdrawn
from trainsync.monitor.commit.verifier import Verifier
from trainsync.monitor.errors import StepLeasedError, StorageUnavailableError
from trainsync.monitor.ledger.decisions import AbortSave, CommitSave, VerifyReceipt
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import (
    AbortReason,
    CommittedInfo,
    Save,
    SaveKey,
    SaveOwner,
    key_of,
)
from trainsync.storage.errors import (
    DamagedFileError,
    DanglingPointerError,
    FileCheckError,
    LockTimeoutError,
    PromotionConflictError,
    StorageError,
    UnsafePathError,
)
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import LeaseBook
from trainsync.storage.saves import claims, receipts, superseding
from trainsync.storage.saves.receipts import Participant, SaveRegistration

DAMAGE: Final = "damage"
"""Under this name a damaged checkpoint is a problem, until a newer one is committed."""

_LOG = logging.getLogger(__name__)


class SaveExecutor:
    """See the module's docstring. `OSError` comes out of `rebuild` and `look` alone."""

    def __init__(
        self,
        run: RunDirectory,
        committer: Committer,
        removal: Removal,
        ledger: Ledger,
        leases: LeaseBook,
        *,
        max_to_keep: int | None,
        io_tries: int,
        observer: Observer,
        executor: Executor | None,
        monotonic: Callable[[], float],
        deleter: Executor | None,
        clock: Callable[[], datetime],
    ) -> None:
        self._run = run
        self._clock = clock
        self._committer = committer
        self._removal = removal
        self._empty_ledger = ledger.copy_empty
        self.ledger = ledger
        self._observer = observer
        self._verifier = Verifier(committer.verify, executor)
        self._scan = StagingScan(run, committer.clean_aborted)
        self._backoff = CommitBackoff(io_tries)
        self._stamps: dict[SaveKey, Stamps] = {}
        self._learnt = ""  # what the last rebuild was logged as
        self._told: set[str] = set()  # problems of pointers that were logged
        self._unregistered: set[SaveKey] = set()  # of which was warned
        self.health = VolumeHealth(observer)
        self._cleanup = Cleanup(
            run,
            committer,
            removal,
            self.health,
            leases,
            max_to_keep=max_to_keep,
            monotonic=monotonic,
            deleter=deleter,
            repair=self.repair,
            late=self._late,
        )
        self.revision = 0

    @property
    def readers(self) -> int:
        """Leases of readers in force."""
        return self._cleanup.readers

    # Facts in.

    def rebuild(self, run_uid: str, now: datetime) -> None:
        """Forget everything and learn it from the disk. Raises `OSError`, `StorageError`."""
        self.ledger = self._empty_ledger()
        self.health.clear()
        self._backoff.keep(frozenset())
        self._stamps = {}
        for step in superseding.finish(self._run):
            _LOG.warning("step %d: an interrupted replacement is completed", step)
        for claim in claims.read_claims(self._run, run_uid):
            self.ledger.grant(claim.cluster, SaveOwner(claim.attempt, claim.incarnation))
        found, problems = read_committed(self._run, run_uid)
        for kind, info in found:
            self.ledger.committed(kind, info)
        if problems:
            self.health.found("manifests", "; ".join(problems))
        self._removal.discard_temporaries()
        self._scan.into(self.ledger, everything=True)
        self._cleanup.begin({save.key for save in self.ledger.saves() if not save.open})
        for kind in SaveKind:
            try:
                self.repair(kind)
            except DanglingPointerError as error:
                self.health.io_error(f"{kind} pointer", str(error), Unhealthy.POINTER)
        self.revision += 1
        saves = [f"{save.key}: {save.state}" for save in self.ledger.saves() if save.open]
        steps = self.ledger.steps(SaveKind.CHECKPOINT)[-5:]
        learnt = f"attempt {self.ledger.attempt}, checkpoints {steps}, open saves {saves}"
        # A claim after another monitor's work rebuilds once more, mostly to the same.
        _LOG.log(
            logging.INFO if learnt != self._learnt else logging.DEBUG, "ledger rebuilt: %s", learnt
        )
        self._learnt = learnt
        self._cleanup.sweep(self.ledger, now)

    def repair(self, kind: SaveKind) -> CommittedInfo | None:
        """Make pointer and ledger agree with the newest valid manifest, and return that.

        Raises:
            DanglingPointerError: there was a commit, and nothing valid is left.
        """
        newest, problems = self._committer.repair_pointer(kind)
        for problem in problems:
            _LOG.log(logging.DEBUG if problem in self._told else logging.ERROR, "%s", problem)
        self._told.update(problems)
        if not problems:
            self.health.solved(f"{kind} pointer")
        elif self.health.found(f"{kind} pointer", text := "; ".join(problems), Unhealthy.POINTER):
            self._observer.damaged(kind, text)
        if newest is None:
            self._cleanup.pointed(kind, None)
            return None
        info = info_of(newest, self._committer.run_uid)
        for step in self.ledger.steps(kind):
            if step > info.step:
                self.ledger.uncommitted(kind, step)
        self._cleanup.pointed(kind, info.step)
        return info

    def grant(self, cluster: str, owner: SaveOwner) -> None:
        """A claim is durable."""
        self.ledger.grant(cluster, owner)
        in_force = self.ledger.owners
        self._backoff.keep(in_force)
        self._stamps = {k: v for k, v in self._stamps.items() if k.owner in in_force}
        self._cleanup.granted(self.ledger)
        self.revision += 1

    def register(self, registration: SaveRegistration) -> Save:
        """See `Ledger.register`."""
        save = self.ledger.register(registration)
        self.revision += 1
        return save

    def already_committed(self, key: SaveKey, digest: str) -> None:
        """The step is validly committed by an older attempt: what is staged again goes.

        Raises:
            OSError: not recorded.
        """
        self._committer.record_committed(key, digest)
        self.ledger.ended_committed(key, digest)
        self._cleanup.ended(key)
        self.revision += 1

    def look(self, key: SaveKey, path: Path) -> None:
        """Take the receipt at ``path``, if there is one."""
        try:
            receipt = receipts.read_receipt(path)
        except FileNotFoundError:
            return
        except DamagedFileError as error:
            self.fail(key, AbortReason.BAD_RECORD, str(error))
            return
        if key_of(receipt) != key:
            self.fail(key, AbortReason.BAD_RECORD, f"{path}: speaks of another save")
            return
        self.ledger.receive(receipt)
        self._late(key, receipt.participant)

    def _late(self, key: SaveKey, participant: Participant) -> None:
        if self.ledger.late(key, participant):
            _LOG.error("%s is committed without %s, which was not registered", key, participant)
            self._observer.late_part(key.kind)
            self.revision += 1

    def fail(self, key: SaveKey, reason: AbortReason, message: str) -> None:
        """See `Ledger.fail`."""
        self.ledger.fail(key, reason, message)

    # Work.

    @property
    def busy(self) -> bool:
        """Whether checks are running."""
        return self._verifier.busy

    def tick(self, now: datetime) -> None:
        """Scan the volume and carry out the decisions."""
        try:
            self._scan.into(self.ledger, everything=False)
            self.health.solved("scan")
        except (OSError, StorageError) as error:
            self.health.io_error("scan", str(error))
        self.act(now)
        self._warn_of_unregistered()
        self._cleanup.sweep_if_due(self.ledger, now)

    def _warn_of_unregistered(self) -> None:
        found = {save.key for save in self.ledger.saves() if save.unregistered_long}
        for key in sorted(found - self._unregistered):
            _LOG.warning(
                "%s cannot commit: parts are written, and no process registered it; expected a "
                "call of register or register_and_monitor with all participants",
                key,
            )
        self._unregistered = found

    def settle(self, now: datetime) -> None:
        """Commit what is complete before an attempt is superseded.

        Raises:
            StorageUnavailableError: the volume refused a commit that will be tried again, or
                readers hold the lock, for about a minute. (One that waits until a reader of the
                step that it replaces is done is given up: that may take as long as it likes.)
            OSError, StorageError: the volume cannot be read.
        """
        self._scan.into(self.ledger, everything=False)
        self.act(now, wait=True)
        for save in self.ledger.saves():
            why = self._backoff.in_the_way(save.key, now)
            if save.open and why is not None:
                raise StorageUnavailableError(
                    f"{save.key} is to be committed before a newer attempt begins, and {why}; "
                    "ask again"
                )

    def abandon(self, owner: SaveOwner, why: str, now: datetime) -> None:
        """Abort what the owner has not completed: it gives its attempt to its successor."""
        for save in self.ledger.saves():
            if save.open and save.key.owner == owner:
                self.fail(save.key, AbortReason.RESTARTED, why)
        self.act(now, wait=True)

    def act(self, now: datetime, *, wait: bool = False) -> None:
        """Carry out decisions until none is left that can be carried out now."""
        while True:
            decisions = [
                d for d in self.ledger.decisions(now) if wait or not self._backoff.waits(d.key, now)
            ]
            for decision in decisions:
                if isinstance(decision, VerifyReceipt) and self._verifier.start(decision):
                    self.ledger.checking(decision.key, decision.receipt)
            changed = self._take_checks(now, wait=wait)
            for decision in decisions:
                if isinstance(decision, CommitSave):
                    changed |= self._commit(decision, now)
                elif isinstance(decision, AbortSave):
                    self._abort(decision)
                    changed = True
            if not changed:
                break
        self._cleanup.clean_up(self.ledger, now)

    def _take_checks(self, now: datetime, *, wait: bool) -> bool:
        changed = False
        for check in self._verifier.finished(wait=wait):
            if check.error is None:
                self.ledger.verified(check.key, check.receipt)
                self._stamps.setdefault(check.key, {}).update(check.stamps)
                changed = True
            elif isinstance(check.error, StorageError):
                self.fail(check.key, AbortReason.BAD_FILE, str(check.error))
                changed = True
            elif isinstance(check.error, OSError):
                self.ledger.unchecked(check.key, check.receipt)
                changed |= self._postpone(check.key, "check", check.error, now)
            else:
                raise check.error
        return changed

    def _commit(self, commit: CommitSave, now: datetime) -> bool:
        try:
            # A rank that registers by a file on the disk was not told that the step is committed.
            # Not asked before all receipts are there: its staging would go under its hands.
            digest = already_committed.digest(self._run, self.ledger, commit.key)
            if digest is not None:
                self.already_committed(commit.key, digest)
                self._forget(commit.key)
                return True
            if drop_withdrawn(self.ledger, commit.key, self._committer.directory(commit.key)):
                return True
            info = self._committer.commit(commit, self._stamps.get(commit.key, {}), now)
        except (StepLeasedError, LockTimeoutError) as error:
            _LOG.info("%s is not committed yet: %s", commit.key, error)
            if isinstance(error, LockTimeoutError):
                self._backoff.locked_out(commit.key)
                return False
            waited = self._backoff.leased(commit.key, now)
            if waited <= self.ledger.save_deadline:
                return False
            within = f"for {waited.total_seconds():g} s"
            self.fail(commit.key, AbortReason.DEADLINE, f"{error} {within}")
        except (FileCheckError, UnsafePathError) as error:
            self.fail(commit.key, AbortReason.BAD_FILE, str(error))
        except PromotionConflictError as error:
            self.fail(commit.key, AbortReason.CONFLICT, str(error))
        except StorageError as error:
            self.fail(commit.key, AbortReason.BAD_RECORD, str(error))
        except OSError as error:
            return self._postpone(commit.key, "commit", error, now)
        else:
            self._written(commit.key)
            self.ledger.committed(commit.key.kind, info)
            if commit.key.kind is SaveKind.CHECKPOINT:
                self.health.solved(DAMAGE)  # there is one to resume from again
            # Promotion and manifest take time, too.
            seconds = (self._clock() - commit.registration.created_at).total_seconds()
            self._observer.committed(commit.key.kind, info, max(seconds, 0.0))
            _LOG.info("%s committed, %d bytes, %s", commit.key, info.bytes, info.digest)
            self._forget(commit.key)
            self._cleanup.committed(commit.key)
        return True

    def _abort(self, abort: AbortSave) -> None:
        save = self.ledger.find(abort.key)
        files = save.files if save is not None else ()
        try:
            digest = already_committed.digest_in_spite_of(
                self._run, self.ledger, self._committer.run_uid, abort.key
            )
            if digest is not None:
                why = abort.cause.message
                _LOG.warning("%s is committed already and stays so, although: %s", abort.key, why)
                self.already_committed(abort.key, digest)
                self._forget(abort.key)
                return
            self._committer.abort(abort.key, files, abort.cause.message)
        except (OSError, StorageError) as error:
            # The trainer must learn of the abort although the disk fails; the cleanup comes again.
            self.health.io_error("abort", f"{abort.key}: {error}")
            self._cleanup.half_aborted(abort.key, files)
        else:
            self._cleanup.ended(abort.key)
        self._written(abort.key)
        self.ledger.aborted(abort.key, abort.cause.message)
        self._observer.aborted(abort.key, abort.cause)
        _LOG.error("%s aborted: %s", abort.key, abort.cause.message)
        self._forget(abort.key)

    def _written(self, key: SaveKey) -> None:
        # Told when a save ends, and not when a receipt is seen: a monitor that starts anew sees
        # the receipts of open saves again, but those of ended ones never.
        save = self.ledger.find(key)
        if save is not None:
            for participant in sorted(save.receipts):
                self._observer.written(save.receipts[participant])

    def _forget(self, key: SaveKey) -> None:
        self._backoff.forget(key)
        self._stamps.pop(key, None)
        self.revision += 1

    def _postpone(self, key: SaveKey, doing: str, error: OSError, now: datetime) -> bool:
        """Try again later; after the last try the save has failed. Whether it has."""
        tries, last = self._backoff.refused(key, now)
        self._observer.io_error(doing)
        _LOG.warning(
            "%s: %s failed, try %d of %d: %s", key, doing, tries, self._backoff.limit, error
        )
        if last:
            self.fail(key, AbortReason.IO_ERROR, f"{doing} failed {tries} times: {error}")
        return last
