"""The monitor's work on the disk, one save at a time. Every step can be done again.

Order of a commit: `Committer.commit` renames the files into the step and writes the manifest;
`Cleanup.clean_up` then moves the pointer, records the outcome, retains, and clears staging and
trash. The manifest is the commit point: before it, a save can still be aborted;
after it, the steps that are left are repeated until they succeed.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.monitor.errors import StepLeasedError
from trainsync.monitor.ledger.decisions import CommitSave
from trainsync.monitor.ledger.saves import CommittedInfo, SaveKey, SaveOwner
from trainsync.storage import atomic, leases
from trainsync.storage.errors import (
    DamagedFileError,
    FileCheckError,
    PromotionConflictError,
    StorageError,
)
from trainsync.storage.layout import RunDirectory, SaveDirectory, look_inside
from trainsync.storage.saves import manifest, pointers, promote, receipts, retention, superseding
from trainsync.storage.saves.receipts import FileEntry, Receipt, SaveOutcome

_LOG = logging.getLogger(__name__)
LOCK_SECONDS: Final = 2.0
"""Longest wait for readers' lock: requests wait meanwhile, and it is tried again."""

Stamp = tuple[int, int, int]
"""Inode, size and time of the last write (ns): the same after a rename, another after a change."""
Stamps = dict[str, Stamp]


@dataclass(frozen=True)
class Authority:
    """Whether this monitor may change what is committed.

    ``gate`` raises `NotReadyError` when it may not (it does not hold its Lease); ``term`` counts
    how often the right was won, so that a loss in between is noticed.
    """

    gate: Callable[[], None] = lambda: None
    term: Callable[[], int] = lambda: 0


class _There(Enum):
    """A manifest that is there before a save is committed."""

    NONE = auto()
    WHOLE = auto()
    """A readable manifest of an earlier attempt."""
    DAMAGED = auto()
    """A manifest of an earlier attempt that cannot be read, or whose files are not as it says."""
    OWN = auto()
    """A manifest of the save's attempt, or of a newer one."""


class Committer:
    """Disk actions of one run. All methods may raise `OSError`; then they can be called again."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        run_uid: str,
        with_digest: bool,
        authority: Authority,
        leased: Callable[[], Set[int]],
    ) -> None:
        self._run = run
        self._leased = leased
        self.run_uid = run_uid
        self._with_digest = with_digest
        self._authority = authority

    def directory(self, key: SaveKey) -> SaveDirectory:
        """Staging of the save."""
        return self._run.save(key.owner.attempt, key.owner.incarnation, key.kind, key.step)

    def verify(self, key: SaveKey, receipt: Receipt) -> Stamps:
        """Compare the receipt's files, in staging or already promoted, with what it says.

        Returns how each file looked just before it was read, for `commit` to see a later change.

        Raises:
            FileCheckError: a file is missing or differs.
            UnsafePathError: a path leaves staging or is a symbolic link.
        """
        save = self.directory(key)
        stamps = {}
        for entry in receipt.files:
            base = promote.locate(self._run, save, key.step, entry, receipt.writer)
            # There may lie an older save's file of that name and size, see `promote.locate`.
            with_digest = self._with_digest or base == self._run.step(key.step)
            info = manifest.check_file(base, entry, with_digest=with_digest)
            stamps[entry.path] = _stamp(info)
        return stamps

    def commit(
        self, commit: CommitSave, stamps: Mapping[str, Stamp], now: datetime
    ) -> CommittedInfo:
        """Promote the files and write the manifest.

        Fsyncs come in this order: parents of new directories (`atomic.make_directory`), the
        receipts' directory, those of the renamed files (`promote.promote`), the manifest and its
        directory (`atomic.write_bytes`). Weights of a step that is there already are promoted
        aside, and the directories are exchanged last (`_supersede`).

        Args:
            stamps: of every file, from `verify`.

        Raises:
            FileCheckError, UnsafePathError, PromotionConflictError, DamagedFileError: it cannot
                be committed.
            StepLeasedError, LockTimeoutError: a reader is in the way; try again.
        """
        key, registration = commit.key, commit.registration
        save = self.directory(key)
        files = {entry.path: entry for entry in commit.files}
        if registration.reuse_state_dict:
            base = manifest.read_manifest(self._run, SaveKind.STATE_DICT, key.step).manifest
            manifest.check_manifest(self._run, base, with_digest=False)
            files = {entry.path: entry for entry in base.files} | files
        replaces = self._replaces(key)
        target = superseding.aside(self._run, save) if replaces else self._run.step(key.step)
        if not replaces:
            promote.check_conflicts(self._run, key.kind, key.step, commit.files)
            # With another's damaged manifest in place, a crash amid the renames would leave a
            # manifest over a mixture.
            self._drop_damaged(key)
        atomic.make_directory(target)
        # Receipts alone tell whose files these are, should the machine go amid the renames.
        with suppress(FileNotFoundError):  # what is missing with them the promotion says
            atomic.fsync_directory(save.receipts)
        promote.promote(
            self._run,
            save,
            key.step,
            commit.files,
            self._before_rename,
            target,
            commit.writers,
        )
        self._check_unchanged(commit, stamps, target)
        failpoint("commit.promoted")
        self._authority.gate()
        # What was set aside there is saved again.
        self._run.set_aside(key.kind, key.step).unlink(missing_ok=True)
        written = manifest.write_manifest(
            self._run,
            manifest.Manifest(
                kind=key.kind,
                step=key.step,
                attempt=key.owner.attempt,
                incarnation=key.owner.incarnation,
                run_uid=self.run_uid,
                created_at=now,
                participants=tuple(sorted(registration.participants)),
                files=tuple(sorted(files.values())),
            ),
            target,
        )
        if replaces:
            self._supersede(key, target)
        failpoint("commit.manifest")
        return info_of(written, self.run_uid)

    def abort(self, key: SaveKey, files: Iterable[FileEntry], error: str) -> None:
        """Record the outcome, then remove what was staged or half promoted."""
        save = self.directory(key)
        failpoint("commit.aborting")
        self._authority.gate()
        # A failed fsync can leave a manifest that is not known to be durable.
        if not superseding.put_back(self._run, save, key.step):
            self._drop_own(key)
        outcome = SaveOutcome(kind=key.kind, step=key.step, error=error)
        if not save.aborted.exists():
            try:
                receipts.write_outcome(save, outcome)
            except OSError:
                # A full disk: the staged bytes fill it. Readers on the disk learn it afterwards.
                self._undo(key, files)
                self._clean(save)
                try:
                    retention.empty_trash(self._run)
                except (OSError, StorageError) as problem:  # what could go is gone
                    _LOG.warning("amid the abort of %s: %s", key, problem)
                receipts.write_outcome(save, outcome)
        self._undo(key, files)
        self._clean(save)

    def move_pointer(self, kind: SaveKind, step: int) -> None:
        """Name ``step`` unless a newer one is named; a damaged pointer is repaired."""
        self._authority.gate()
        try:
            pointers.move_pointer(self._run, kind, step, self._before_pointer)
        except DamagedFileError:
            self.repair_pointer(kind)
        failpoint("commit.pointer")

    def repair_pointer(self, kind: SaveKind) -> tuple[manifest.Committed | None, list[str]]:
        """See `pointers.repair_pointer`."""
        return pointers.repair_pointer(self._run, kind, self._before_pointer)

    def clean_committed(self, key: SaveKey, digest: str) -> None:
        """Leave only the outcome in the save's staging."""
        if self.directory(key).path.exists():
            self.record_committed(key, digest)
            # The outcome is durable: what a crash brings back is known to be of an ended save.
            self._clean(self.directory(key), durably=False)
            failpoint("commit.cleaned")

    def record_committed(self, key: SaveKey, digest: str) -> None:
        """Write the outcome, unless there is one."""
        save = self.directory(key)
        if receipts.read_outcome(save) is None:
            outcome = SaveOutcome(kind=key.kind, step=key.step, manifest_digest=digest)
            receipts.write_outcome(save, outcome)

    def clean_aborted(self, key: SaveKey, files: Iterable[FileEntry]) -> None:
        """Remove what an interrupted abort, or a late writer, left beside the outcome."""
        self._undo(key, files)
        self._clean(self.directory(key))

    def forget(self, key: SaveKey) -> None:
        """Remove the save's staging with its outcome."""
        retention.discard(self._run, self.directory(key).path)

    def _replaces(self, key: SaveKey) -> bool:
        """Whether the save takes the place of what an older attempt committed at its step.

        So does a state dict with an older one, and with a checkpoint that is damaged: no attempt
        resumes from it, and it must not keep its step from every attempt to come.

        Raises:
            PromotionConflictError: there is a checkpoint beside the older state dict.
        """
        if key.kind is not SaveKind.STATE_DICT:
            return False
        superseding.restore(self._run, self.directory(key), key.step)
        state_dict = self._there(key, SaveKind.STATE_DICT)
        checkpoint = self._there(key, SaveKind.CHECKPOINT)
        if checkpoint is _There.DAMAGED:
            return True
        if checkpoint is _There.NONE:
            return state_dict in (_There.WHOLE, _There.DAMAGED)
        if state_dict is _There.WHOLE:
            raise PromotionConflictError(
                f"step {key.step} holds a checkpoint beside the state dict of an older attempt, "
                "which therefore stays"
            )
        return False

    def _there(self, key: SaveKey, kind: SaveKind) -> _There:
        """Tell the manifest of ``kind`` at the step by its attempt and its files' sizes."""
        try:
            found = manifest.read_manifest(self._run, kind, key.step).manifest
            if found.age(self.run_uid) >= key.owner.age:
                return _There.OWN
            manifest.check_manifest(self._run, found, with_digest=False)
        except FileNotFoundError:
            return _There.NONE
        except (DamagedFileError, FileCheckError):
            return _There.DAMAGED
        return _There.WHOLE

    def _supersede(self, key: SaveKey, place: Path) -> None:
        failpoint("commit.superseding")
        with leases.lock(self._run, LOCK_SECONDS, f"the monitor, process {os.getpid()}"):
            if key.step in self._leased():
                raise StepLeasedError(f"{key} waits: a reader holds the older one")
            self._authority.gate()
            superseding.carry_over(self._run, key.step, place)
            superseding.put_in_place(self._run, key.step, place)

    def _check_unchanged(
        self, commit: CommitSave, stamps: Mapping[str, Stamp], target: Path
    ) -> None:
        # A participant may have written again after its files were checked, while the save waited
        # for the others. Looked at here, after the renames, because no path of a participant
        # leads to the files any more.
        for entry in commit.files:
            info = look_inside(target, entry.path)[1]
            if info is None or _stamp(info) != stamps.get(entry.path):
                manifest.check_file(target, entry, with_digest=True)

    def _before_pointer(self) -> None:
        failpoint("commit.pointing")
        self._authority.gate()

    def _before_rename(self) -> None:
        failpoint("commit.promoting")
        self._authority.gate()

    def _drop_damaged(self, key: SaveKey) -> None:
        """Remove another's manifest at the step if it does not stand.

        Raises:
            PromotionConflictError: it stands.
        """
        try:
            there = manifest.read_manifest(self._run, key.kind, key.step).manifest
            if SaveOwner(there.attempt, there.incarnation) == key.owner:
                return
            manifest.check_manifest(self._run, there, with_digest=False)
        except FileNotFoundError:
            return
        except (DamagedFileError, FileCheckError):
            self._drop_manifest(key)
        else:
            raise PromotionConflictError(
                f"{key.kind} {key.step} is committed by attempt {there.attempt}, and stays"
            )

    def _drop_own(self, key: SaveKey) -> None:
        try:
            there = manifest.read_manifest(self._run, key.kind, key.step).manifest
        except (FileNotFoundError, DamagedFileError):
            return
        if SaveOwner(there.attempt, there.incarnation) == key.owner:
            self._drop_manifest(key)

    def _drop_manifest(self, key: SaveKey) -> None:
        self._authority.gate()
        self._run.manifest(key.kind, key.step).unlink()
        atomic.fsync_directory(self._run.step(key.step))

    def _undo(self, key: SaveKey, files: Iterable[FileEntry]) -> None:
        if self._run.step(key.step).exists():
            promote.undo(self._run, key.step, tuple(files))

    def _clean(self, save: SaveDirectory, *, durably: bool = True) -> None:
        beside = superseding.leftovers(self._run, save)
        for directory in (save.files, save.receipts, *beside):
            if os.path.lexists(directory):
                retention.discard(self._run, directory, durably=durably)


def _stamp(info: os.stat_result) -> Stamp:
    return info.st_ino, info.st_size, info.st_mtime_ns


def info_of(committed: manifest.Committed, run_uid: str) -> CommittedInfo:
    """The view of a manifest that the ledger of the run ``run_uid`` has."""
    record = committed.manifest
    return CommittedInfo(
        step=record.step,
        owner=SaveOwner(record.attempt, record.incarnation),
        digest=committed.digest,
        bytes=record.bytes,
        time=record.created_at,
        foreign=record.run_uid != run_uid,
    )


def read_committed(
    run: RunDirectory, run_uid: str
) -> tuple[list[tuple[SaveKind, CommittedInfo]], list[str]]:
    """Every readable manifest, and a sentence for each that is not. Raises `OSError`."""
    found, problems = [], []
    for kind in SaveKind:
        for step in manifest.committed_steps(run, kind):
            try:
                found.append((kind, info_of(manifest.read_manifest(run, kind, step), run_uid)))
            except FileNotFoundError:
                continue
            except (DamagedFileError, FileCheckError) as error:
                problems.append(str(error))
    return found, problems
