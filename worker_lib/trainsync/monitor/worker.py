"""Carries out the ledger's decisions: scans, checks, commits, aborts, tidies, with bounded retries.

Owned by `MonitorCore`; see there for threads.
"""

import logging
import os
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.monitor.committer import Committer, Stamps, info_of, read_committed
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.ledger import (
    Abort,
    AbortReason,
    Commit,
    CommittedInfo,
    DifferentParticipantsError,
    Ledger,
    Owner,
    Save,
    SaveKey,
    Verify,
    key_of,
)
from trainsync.monitor.observer import Observer
from trainsync.monitor.verifier import Verifier
from trainsync.storage import claims, pointers, receipts, retention
from trainsync.storage.errors import (
    DamagedFileError,
    DanglingPointerError,
    FileCheckError,
    PromotionConflictError,
    StorageError,
    UnsafePathError,
)
from trainsync.storage.layout import RunDirectory
from trainsync.storage.receipts import Registration
from trainsync.storage.scan import SaveOnDisk, Scanner

_LOG = logging.getLogger(__name__)

OUTCOMES_KEPT: Final = 32
"""Ended saves of each kind whose outcome stays readable in staging."""

_SWEEP = timedelta(seconds=30)
_FIRST_WAIT = timedelta(seconds=1)
_TIDY_WAIT = timedelta(seconds=5)


@dataclass
class _Retry:
    tries: int
    not_before: datetime


class SaveWorker:
    """See the module's docstring. `OSError` comes out of `rebuild` and `look` alone."""

    def __init__(
        self,
        run: RunDirectory,
        committer: Committer,
        ledger: Ledger,
        *,
        max_to_keep: int | None,
        io_tries: int,
        observer: Observer,
        executor: Executor | None,
    ) -> None:
        self._run = run
        self._committer = committer
        self._empty_ledger = ledger.copy_empty
        self.ledger = ledger
        self._max_to_keep = max_to_keep
        self._io_tries = io_tries
        self._observer = observer
        self._verifier = Verifier(committer.verify, executor)
        self._scanner = Scanner(run)
        self._retries: dict[SaveKey, _Retry] = {}
        self._stamps: dict[SaveKey, Stamps] = {}
        self._protected: int | None = None
        self._problems: dict[str, str] = {}
        self._pointers: dict[SaveKind, int] = {}
        self._retention_due = True
        self._untidy: set[SaveKey] = set()
        self._tidy_not_before: datetime | None = None
        self._swept: datetime | None = None
        self.revision = 0

    @property
    def error(self) -> str | None:
        """What is wrong with the volume now."""
        return "; ".join(self._problems.values()) or None

    def note_io_error(self, doing: str, message: str) -> None:
        """The volume refused something; `error` says so until it works again."""
        if self._problems.get(doing) != message:
            _LOG.warning("%s: %s", doing, message)
        self._problems[doing] = message
        self._observer.io_error(doing)

    # Facts in.

    def rebuild(self, run_uid: str, now: datetime) -> None:
        """Forget everything and learn it from the disk. Raises `OSError`, `StorageError`."""
        self.ledger = self._empty_ledger()
        self._problems = {}
        self._retries, self._stamps, self._untidy, self._pointers = {}, {}, set(), {}
        self._retention_due = True
        for claim in claims.read_claims(self._run, run_uid):
            self.ledger.grant(claim.cluster, Owner(claim.attempt, claim.incarnation))
        found, problems = read_committed(self._run)
        for kind, info in found:
            self.ledger.committed(kind, info)
        if problems:
            self._problems["manifests"] = "; ".join(problems)
        retention.remove_temporaries(self._run.root)
        self._scan(everything=True)
        self._untidy = {save.key for save in self.ledger.saves() if not save.open}
        for kind in SaveKind:
            try:
                self.repair(kind)
            except DanglingPointerError as error:
                self.note_io_error(f"{kind} pointer", str(error))
        self.revision += 1
        _LOG.info(
            "ledger rebuilt: attempt %s, checkpoints %s, saves %s",
            self.ledger.attempt,
            self.ledger.steps(SaveKind.CHECKPOINT)[-5:],
            [f"{save.key}: {save.state}" for save in self.ledger.saves()],
        )
        self._sweep(now)

    def repair(self, kind: SaveKind) -> CommittedInfo | None:
        """Make pointer and ledger agree with the newest valid manifest, and return that.

        Raises:
            DanglingPointerError: there was a commit, and nothing valid is left.
        """
        newest, problems = pointers.repair_pointer(self._run, kind)
        for problem in problems:
            _LOG.error("%s", problem)
        if problems:
            self._problems[f"{kind} pointer"] = "; ".join(problems)
        if newest is None:
            return None
        info = info_of(newest)
        for step in self.ledger.steps(kind):
            if step > info.step:
                self.ledger.uncommitted(kind, step)
        self._pointers[kind] = info.step
        return info

    def grant(self, cluster: str, owner: Owner) -> None:
        """A claim is durable."""
        self.ledger.grant(cluster, owner)
        self._retries = {k: v for k, v in self._retries.items() if k.owner in self.ledger.owners}
        self._stamps = {k: v for k, v in self._stamps.items() if k.owner in self.ledger.owners}
        self._untidy = {key for key in self._untidy if key.owner in self.ledger.owners}
        self._swept = None  # what is superseded goes at the next tick
        self.revision += 1

    def register(self, registration: Registration) -> Save:
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
        self._untidy.add(key)
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

    def fail(self, key: SaveKey, reason: AbortReason, message: str) -> None:
        """See `Ledger.fail`."""
        self.ledger.fail(key, reason, message)

    def protect(self, step: int) -> None:
        """Retention never takes ``step``, which the attempt in force resumed from."""
        self._protected = step

    # Work.

    @property
    def busy(self) -> bool:
        """Whether checks are running."""
        return self._verifier.busy

    def tick(self, now: datetime) -> None:
        """Scan and act."""
        try:
            self._scan(everything=False)
            self._problems.pop("scan", None)
        except OSError as error:
            self.note_io_error("scan", str(error))
        self.act(now)
        if self._swept is None or now - self._swept >= _SWEEP:
            self._sweep(now)

    def settle(self, now: datetime) -> None:
        """Commit what is complete before an attempt is superseded. Raises `OSError`."""
        self._scan(everything=False)
        self.act(now, wait=True)

    def act(self, now: datetime, *, wait: bool = False) -> None:
        """Carry out decisions until none is left that can be carried out now."""
        while True:
            decisions = [
                d for d in self.ledger.decisions(now) if wait or not self._postponed(d.key, now)
            ]
            for decision in decisions:
                if isinstance(decision, Verify):
                    self._verifier.start(decision)
            changed = self._take_checks(now, wait=wait)
            for decision in decisions:
                if isinstance(decision, Commit):
                    changed |= self._commit(decision, now)
                elif isinstance(decision, Abort):
                    self._abort(decision)
                    changed = True
            if not changed:
                break
        self._tidy(now)

    def _take_checks(self, now: datetime, *, wait: bool) -> bool:
        changed = False
        for check in self._verifier.finished(wait=wait):
            if check.error is None:
                self.ledger.verified(check.key, check.receipt)
                self._stamps.setdefault(check.key, {}).update(check.stamps)
                changed = True
            elif isinstance(check.error, (FileCheckError, UnsafePathError)):
                self.fail(check.key, AbortReason.BAD_FILE, str(check.error))
                changed = True
            elif isinstance(check.error, OSError):
                changed |= self._postpone(check.key, "check", check.error, now)
            else:
                raise check.error
        return changed

    def _commit(self, commit: Commit, now: datetime) -> bool:
        try:
            info = self._committer.commit(commit, self._stamps.get(commit.key, {}), now)
        except (FileCheckError, UnsafePathError) as error:
            self.fail(commit.key, AbortReason.BAD_FILE, str(error))
        except PromotionConflictError as error:
            self.fail(commit.key, AbortReason.CONFLICT, str(error))
        except DamagedFileError as error:
            self.fail(commit.key, AbortReason.BAD_RECORD, str(error))
        except OSError as error:
            return self._postpone(commit.key, "commit", error, now)
        else:
            self.ledger.committed(commit.key.kind, info)
            seconds = (now - commit.registration.created_at).total_seconds()
            self._observer.committed(commit.key.kind, info, max(seconds, 0.0))
            _LOG.info("%s committed, %d bytes, %s", commit.key, info.bytes, info.digest)
            self._retries.pop(commit.key, None)
            self._stamps.pop(commit.key, None)
            self._untidy.add(commit.key)
            self._retention_due = True
            self._tidy_not_before = None
            self.revision += 1
        return True

    def _abort(self, abort: Abort) -> None:
        save = self.ledger.find(abort.key)
        files = save.files if save is not None else ()
        try:
            self._committer.abort(abort.key, files, abort.cause.message)
        except (OSError, StorageError) as error:
            # The trainer must learn of the abort whatever the disk says; tidying comes again.
            self.note_io_error("abort", f"{abort.key}: {error}")
        self.ledger.aborted(abort.key, abort.cause.message)
        self._observer.aborted(abort.key.kind, abort.cause.reason)
        _LOG.error("%s aborted: %s", abort.key, abort.cause.message)
        self._retries.pop(abort.key, None)
        self._stamps.pop(abort.key, None)
        self._untidy.add(abort.key)
        self.revision += 1

    def _postpone(self, key: SaveKey, doing: str, error: OSError, now: datetime) -> bool:
        """Try again later; after the last try the save has failed. Whether it has."""
        tries = self._retries[key].tries + 1 if key in self._retries else 1
        self._observer.io_error(doing)
        _LOG.warning("%s: %s failed, try %d of %d: %s", key, doing, tries, self._io_tries, error)
        if tries >= self._io_tries:
            self.fail(key, AbortReason.IO_ERROR, f"{doing} failed {tries} times: {error}")
            self._retries.pop(key, None)
            return True
        self._retries[key] = _Retry(tries, now + _FIRST_WAIT * 2 ** (tries - 1))
        return False

    def _postponed(self, key: SaveKey, now: datetime) -> bool:
        return key in self._retries and now < self._retries[key].not_before

    # Tidying: nothing here changes what is committed, but for retention.

    def _tidy(self, now: datetime) -> None:
        if self._tidy_not_before is not None and now < self._tidy_not_before:
            return
        self._tidy_not_before = None
        for doing, work in (
            ("pointer", self._move_pointers),
            ("retention", self._retain),
            ("staging", self._clean_staging),
            ("trash", self._committer.empty_trash),
        ):
            try:
                work()
                self._problems.pop(doing, None)
                if doing == "staging":
                    self._problems.pop("abort", None)
            except (OSError, StorageError) as error:
                self.note_io_error(doing, str(error))
                self._tidy_not_before = now + _TIDY_WAIT

    def _move_pointers(self) -> None:
        for kind in SaveKind:
            newest = self.ledger.newest(kind)
            if newest is not None and self._pointers.get(kind, -1) < newest.step:
                self._committer.move_pointer(kind, newest.step)
                self._pointers[kind] = newest.step
                self._problems.pop(f"{kind} pointer", None)

    def _retain(self) -> None:
        if not self._retention_due:
            return
        protected = {save.key.step for save in self.ledger.saves() if save.open}
        if self._protected is not None:
            protected.add(self._protected)
        for kind in SaveKind:
            newest = self.ledger.newest(kind)
            if newest is not None:
                protected.add(newest.step)
        for step in self._committer.retain(self._max_to_keep, protected):
            for kind in SaveKind:
                self.ledger.uncommitted(kind, step)
            _LOG.info("step %d removed: at most %s are kept", step, self._max_to_keep)
        self._retention_due = False

    def _clean_staging(self) -> None:
        for key in sorted(self._untidy):
            save = self.ledger.find(key)
            if save is None:
                pass
            elif save.state is SaveState.COMMITTED:
                self._committer.clean_committed(key, save.manifest_digest or "")
            else:
                self._committer.abort(key, (), save.error or "")
            self._untidy.discard(key)
        for kind in SaveKind:
            ended = [s.key for s in self.ledger.saves() if s.key.kind is kind and not s.open]
            old = sorted(ended, key=lambda key: key.step)[:-OUTCOMES_KEPT]
            for key in old:
                self._committer.forget(key)
            self.ledger.forget(old)

    def _sweep(self, now: datetime) -> None:
        """Remove what is superseded, and what late writers left in saves that ended."""
        try:
            if self.ledger.attempt is not None:
                for owner in self._committer.discard_owners(self.ledger.owners):
                    _LOG.info("staging of %s discarded: it is not in force", owner)
            for save in self.ledger.saves():
                directory = self._committer.directory(save.key)
                late = os.path.lexists(directory.files) or os.path.lexists(directory.receipts)
                if not save.open and late:
                    self._untidy.add(save.key)
            self._problems.pop("sweep", None)
        except NotReadyError:
            raise
        except OSError as error:
            self.note_io_error("sweep", str(error))
        self._swept = now
        self._tidy(now)

    # Scanning.

    def _scan(self, *, everything: bool) -> None:
        def ended(kind: SaveKind, step: int, owner: Owner) -> bool:
            save = self.ledger.find(SaveKey(owner, step, kind))
            return not everything and save is not None and not save.open

        for owner in sorted(self.ledger.owners):
            for found in self._scanner.saves(
                owner.attempt,
                owner.incarnation,
                lambda kind, step, owner=owner: ended(kind, step, owner),  # type: ignore[misc]
            ):
                self._absorb(SaveKey(owner, found.step, found.kind), found)

    def _absorb(self, key: SaveKey, found: SaveOnDisk) -> None:
        outcome = found.outcome
        registration = found.registration
        if registration is not None:
            if key_of(registration) != key:
                self.fail(key, AbortReason.BAD_RECORD, "REGISTRATION.json is of another save")
            else:
                try:
                    self.ledger.register(registration)
                except DifferentParticipantsError as error:
                    self.fail(key, AbortReason.BAD_RECORD, str(error))
        if outcome is not None:
            if outcome.manifest_digest is not None:
                self.ledger.ended_committed(key, outcome.manifest_digest)
            else:
                self.ledger.aborted(key, outcome.error or "")
                self._finish_abort(key, found)
            return
        for receipt in found.receipts:
            self.ledger.receive(receipt)
        for failure in found.failures:
            self.fail(
                key, AbortReason.PARTICIPANT_FAILED, f"{failure.participant}: {failure.error}"
            )
        for message in found.damaged:
            self.fail(key, AbortReason.BAD_RECORD, message)

    def _finish_abort(self, key: SaveKey, found: SaveOnDisk) -> None:
        """A monitor died amid an abort: what it had half promoted is known from receipts."""
        files = [entry for receipt in found.receipts for entry in receipt.files]
        if files:
            self._committer.clean_aborted(key, files)
