"""Removes old steps and superseded staging; the staging of one save is the committer's."""

import logging
import math
import os
from collections.abc import Callable, Set
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.failpoints import failpoint
from trainsync.monitor.commit.committer import LOCK_SECONDS, Authority
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage import leases
from trainsync.storage.errors import FileCheckError
from trainsync.storage.layout import RunDirectory, SaveDirectory
from trainsync.storage.saves import (
    manifest,
    pointers,
    promote,
    retention,
    scan,
    superseding,
    temporaries,
)
from trainsync.storage.saves.receipts import FileEntry

_LOG = logging.getLogger(__name__)


class Removal:
    """Removals of one run. All methods may raise `OSError`; then they can be called again."""

    def __init__(
        self, run: RunDirectory, *, authority: Authority, leased: Callable[[], Set[int]]
    ) -> None:
        self._run = run
        self._authority = authority
        self._leased = leased

    def retain(
        self,
        keep: int,
        protected: Set[int],
        ledger: Ledger,
    ) -> tuple[list[int], list[int]]:
        """Remove steps beyond ``keep``, judged by manifests on disk; the ledger tells their age.

        Returns those that are gone, and those that only a reader's lease kept.

        Raises:
            LockTimeoutError: readers held the lock for too long; try again later.
        """
        removed: list[int] = []
        spared: list[int] = []
        with leases.lock(self._run, LOCK_SECONDS, f"retention of process {os.getpid()}"):
            checkpoints = self._by_age(SaveKind.CHECKPOINT, ledger)
            state_dicts = self._by_age(SaveKind.STATE_DICT, ledger)
            for step in retention.choose_removals(
                checkpoints,
                state_dicts,
                keep,
                protected | self._pointed_at(),
                # The ledger knows none whose damage was seen.
                bad_checkpoints=set(checkpoints).difference(ledger.steps(SaveKind.CHECKPOINT)),
                bad_state_dicts=set(state_dicts).difference(ledger.steps(SaveKind.STATE_DICT)),
            ):
                self._authority.gate()
                gone = retention.remove_unleased(self._run, step, self._leased)
                (removed if gone else spared).append(step)
        failpoint("commit.retention")
        return removed, spared

    def discard_owners(self, ledger: Ledger) -> list[SaveOwner]:
        """Remove what incarnations that are not in force left: staging, half-promoted files.

        Returns those incarnations.
        """
        gone = []
        for attempt, incarnation in scan.owners(self._run):
            owner = SaveOwner(attempt, incarnation)
            if owner not in ledger.owners:
                self._authority.gate()
                self._undo_half_promoted(owner, ledger)
                retention.discard(self._run, self._run.owner(attempt, incarnation))
                gone.append(owner)
        return gone

    def discard_superseded(self, ledger: Ledger) -> None:
        """Remove what lies aside and belongs to no open save."""
        wanted = {
            place
            for save in ledger.saves()
            if save.open
            for place in superseding.leftovers(
                self._run, self._directory(save.key.owner, save.key.kind, save.key.step)
            )
        }
        for place in superseding.places(self._run):
            if place not in wanted:
                self._authority.gate()
                retention.discard(self._run, place)

    def discard_temporaries(self) -> None:
        """Remove what an earlier monitor left when it was killed amid a write."""
        for path in temporaries.remove_monitors(self._run, self._authority.gate):
            _LOG.info("%s is removed: a killed monitor left it", path)

    def _undo_half_promoted(self, owner: SaveOwner, ledger: Ledger) -> None:
        # Before its staging goes: the receipts there tell its files from others', by size alone
        # where the machine took a name; what a manifest lists stays in any case.
        for found in scan.Scanner(self._run).saves(owner.attempt, owner.incarnation):
            step = self._run.step(found.step)
            if found.outcome is not None or not step.exists():
                continue
            save_directory = self._directory(owner, found.kind, found.step)
            wanted = {
                entry.path
                for save in ledger.saves()
                if save.open and save.key.step == found.step
                for entry in save.files
            }
            promoted = [
                entry
                for receipt in found.receipts
                for entry in receipt.files
                if entry.path not in wanted
                and not _present(save_directory.files_of(receipt.writer), entry)
                and _present(step, entry)
            ]
            if promoted:
                promote.undo(self._run, found.step, promoted)

    def _by_age(self, kind: SaveKind, ledger: Ledger) -> list[int]:
        """Committed steps as they were trained: what a newer attempt trained again is newer."""

        def age(step: int) -> tuple[tuple[bool, float, int], int]:
            info = ledger.info(kind, step)
            # One that cannot be read is not the first to go.
            return ((True, math.inf, 0) if info is None else info.age, step)

        return sorted(manifest.committed_steps(self._run, kind), key=age)

    def _pointed_at(self) -> set[int]:
        found = set()
        for kind in SaveKind:
            step = pointers.read_pointer(self._run, kind)
            if step is not None:
                found.add(step)
        return found

    def _directory(self, owner: SaveOwner, kind: SaveKind, step: int) -> SaveDirectory:
        return self._run.save(owner.attempt, owner.incarnation, kind, step)


def _present(base: Path, entry: FileEntry) -> bool:
    try:
        manifest.check_file(base, entry, with_digest=False)
    except FileCheckError:
        return False
    return True
