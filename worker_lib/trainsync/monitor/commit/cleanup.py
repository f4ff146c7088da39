"""Cleans up after a commit or an abort: pointers, retention, staging, trash. Retried until done.

Nothing here changes what is committed, but for retention.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.api.status import RollbackState
from trainsync.monitor.commit.committer import LOCK_SECONDS, Committer
from trainsync.monitor.commit.health import Unhealthy, VolumeHealth
from trainsync.monitor.commit.removal import Removal
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import SaveKey
from trainsync.storage.errors import DamagedFileError, StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import LeaseBook
from trainsync.storage.saves import receipts, retention, rollback
from trainsync.storage.saves.pointers import read_pointer
from trainsync.storage.saves.receipts import FileEntry, Participant
from trainsync.storage.saves.resume_target import ResumeTarget, read_resume_target

OUTCOMES_KEPT: Final = 32
"""Ended saves of each kind whose outcome stays readable in staging."""

_LOG = logging.getLogger(__name__)
_SWEEP: Final = timedelta(seconds=30)
_WAIT: Final = timedelta(seconds=5)


class Cleanup:
    """See the module's docstring.

    Args:
        max_to_keep: committed steps of each kind; None keeps all.
        monotonic: seconds, by which the leases of readers are judged.
        deleter: where what was discarded is deleted; in the calling thread when None.
        repair: makes a pointer and the ledger agree with the newest valid manifest.
        late: told of each participant that wrote after its save ended.
    """

    def __init__(
        self,
        run: RunDirectory,
        committer: Committer,
        removal: Removal,
        health: VolumeHealth,
        leases: LeaseBook,
        *,
        max_to_keep: int | None,
        monotonic: Callable[[], float],
        deleter: Executor | None,
        repair: Callable[[SaveKind], object],
        late: Callable[[SaveKey, Participant], None],
    ) -> None:
        self._run = run
        self._committer = committer
        self._removal = removal
        self._health = health
        self._max_to_keep = max_to_keep
        self._monotonic = monotonic
        self._deleter = deleter
        self._repair = repair
        self._late = late
        self._deleting: Future[None] | None = None
        self._leases = leases
        self._pointers: dict[SaveKind, int] = {}
        self._unclean: set[SaveKey] = set()
        self._ended: dict[SaveKey, None] = {}
        # What may be half promoted of saves whose abort the volume refused.
        self._half_done: dict[SaveKey, tuple[FileEntry, ...]] = {}
        self._retention_due = True
        self._spared = False
        self._not_before: datetime | None = None
        self._swept: datetime | None = None
        self.readers = 0
        """Leases of readers in force at the last look."""

    def begin(self, unclean: set[SaveKey]) -> None:
        """A ledger was rebuilt; of these saves staging may not be clean."""
        self._unclean, self._pointers = unclean, {}
        self._half_done = {}
        self._retention_due = True
        self._not_before = None

    def granted(self, ledger: Ledger) -> None:
        """Another attempt is in force: the next tick removes staging of the older ones."""
        self._unclean = {key for key in self._unclean if key.owner in ledger.owners}
        self._half_done = {k: v for k, v in self._half_done.items() if k in self._unclean}
        self._swept = None

    def committed(self, key: SaveKey) -> None:
        """Its manifest is durable."""
        self._unclean.add(key)
        self._retention_due = True
        self._not_before = None

    def ended(self, key: SaveKey) -> None:
        """Note a save that was aborted, or is committed already: its staging goes."""
        self._unclean.add(key)

    def half_aborted(self, key: SaveKey, files: tuple[FileEntry, ...]) -> None:
        """The volume refused its abort, which is done again; ``files`` may be in the step."""
        self._half_done[key] = files
        self._unclean.add(key)

    def pointed(self, kind: SaveKind, step: int | None) -> None:
        """The pointer is known to name ``step``; None: nothing."""
        if step is None:
            self._pointers.pop(kind, None)
        else:
            self._pointers[kind] = step

    def clean_up(self, ledger: Ledger, now: datetime) -> None:
        """Do what is left to do, unless it failed a moment ago."""
        # Not longer than meant, also when the clock is set back.
        if self._not_before is not None and timedelta(0) < self._not_before - now <= _WAIT:
            return
        self._not_before = None
        for doing, work in (
            ("pointer", self._move_pointers),
            ("outcome", self._record_outcomes),
            ("retention", self._retain),
            ("staging", self._clean_staging),
            ("trash", self._empty_trash),
        ):
            try:
                work(ledger)
                self._health.solved(doing)
                if doing == "staging":
                    self._health.solved("abort")
            except (OSError, StorageError) as error:
                self._health.io_error(doing, str(error))
                self._not_before = now + _WAIT

    def sweep_if_due(self, ledger: Ledger, now: datetime) -> None:
        """`sweep` every 30 s."""
        if self._swept is None or abs(now - self._swept) >= _SWEEP:
            self.sweep(ledger, now)

    def sweep(self, ledger: Ledger, now: datetime) -> None:
        """Remove what is superseded, what late writers left, and leases that ended by themselves.

        A pointer that another process moved is repaired.

        Raises:
            NotReadyError: the gate is closed.
        """
        try:
            self._check_pointers()
            if ledger.attempt is not None:
                for owner in self._removal.discard_owners(ledger):
                    _LOG.info("staging of %s discarded: it is not in force", owner)
            self._removal.discard_superseded(ledger)
            for save in ledger.saves():
                directory = self._committer.directory(save.key)
                late = os.path.lexists(directory.files) or os.path.lexists(directory.receipts)
                if not save.open and late:
                    for participant in receipts.writers(directory):
                        self._late(save.key, participant)
                    self._unclean.add(save.key)
            for name in self._leases.remove_expired(self._monotonic(), LOCK_SECONDS):
                _LOG.warning("the lease %s was not renewed, and is removed", name)
            self.readers = len(self._leases.in_force(self._monotonic()))
            self._retention_due |= self._spared
            self._health.solved("sweep")
        except NotReadyError:
            raise
        except (OSError, StorageError) as error:
            self._health.io_error("sweep", str(error))
        self._swept = now
        self.clean_up(ledger, now)

    def _move_pointers(self, ledger: Ledger) -> None:
        for kind in SaveKind:
            newest = ledger.newest(kind)
            if newest is not None and self._pointers.get(kind, -1) < newest.step:
                self._committer.move_pointer(kind, newest.step)
                self._pointers[kind] = newest.step
                self._health.solved(f"{kind} pointer")

    def _check_pointers(self) -> None:
        for kind, step in list(self._pointers.items()):
            there = None
            with suppress(DamagedFileError):
                there = read_pointer(self._run, kind)
            if there != step:
                _LOG.error(
                    "%s names step %s, expected %d: it is repaired",
                    self._run.pointer(kind),
                    there,
                    step,
                )
                try:
                    self._repair(kind)
                except (OSError, StorageError) as error:
                    self._health.io_error(f"{kind} pointer", str(error), Unhealthy.POINTER)

    def _record_outcomes(self, ledger: Ledger) -> None:
        # Before retention: with its step gone, nothing else would say that it was committed.
        for key in self._unclean:
            save = ledger.find(key)
            committed = save is not None and save.state is SaveState.COMMITTED
            if save is not None and committed and self._committer.directory(key).path.exists():
                self._committer.record_committed(key, save.manifest_digest or "")

    def _retain(self, ledger: Ledger) -> None:
        if not self._retention_due or self._max_to_keep is None:
            return
        protected = {save.key.step for save in ledger.saves() if save.open}
        for kind in SaveKind:
            newest = ledger.newest(kind)
            if newest is not None:
                protected.add(newest.step)
        resumed = self._resume_target(ledger)
        if resumed is not None:
            protected.add(resumed)
        asked = rollback.read(self._run, self._committer.run_uid)
        if asked is not None and asked.state is RollbackState.ACCEPTED:
            protected.add(asked.step)
        removed, spared = self._removal.retain(self._max_to_keep, protected, ledger)
        for step in removed:
            for kind in SaveKind:
                ledger.uncommitted(kind, step)
            _LOG.info("step %d removed: at most %s are kept", step, self._max_to_keep)
        self._retention_due = False
        self._spared = bool(spared)

    def _resume_target(self, ledger: Ledger) -> int | None:
        try:
            target = read_resume_target(self._run)
        except DamagedFileError as error:
            if any(info.owner in ledger.owners for info in ledger.infos(SaveKind.CHECKPOINT)):
                _LOG.warning("RESUME.json is not needed any more, and is removed: %s", error)
                self._run.resume_target.unlink()
                return None
            raise
        return None if target is None else protected_step(ledger, target, self._committer.run_uid)

    def _empty_trash(self, ledger: Ledger) -> None:
        del ledger
        if self._deleting is not None:
            if not self._deleting.done():
                return
            done, self._deleting = self._deleting, None
            done.result()
        entries = retention.trash(self._run)
        if not entries:
            return
        if self._deleter is None:
            retention.delete(entries)
        else:
            # Only these: what retention discards later, it may yet put back.
            self._deleting = self._deleter.submit(retention.delete, entries)

    def _clean_staging(self, ledger: Ledger) -> None:
        for key in sorted(self._unclean):
            save = ledger.find(key)
            if save is None:
                pass
            elif save.state is SaveState.COMMITTED:
                self._committer.clean_committed(key, save.manifest_digest or "")
            else:
                self._committer.abort(key, self._half_done.get(key, ()), save.error or "")
            self._unclean.discard(key)
            self._half_done.pop(key, None)
        # In the order in which they ended: an abort at the deadline is of an old step.
        ended = {save.key: None for save in ledger.saves() if not save.open}
        self._ended = {key: None for key in self._ended if key in ended} | ended
        for kind in SaveKind:
            old = [key for key in self._ended if key.kind is kind][:-OUTCOMES_KEPT]
            for key in old:
                self._committer.forget(key)
            ledger.forget(old)


def protected_step(ledger: Ledger, target: ResumeTarget, run_uid: str) -> int | None:
    """The step that an attempt may still resume from; None once there is a newer checkpoint."""
    newer = any(
        info.step > target.step and info.age >= target.age(run_uid)
        for info in ledger.infos(SaveKind.CHECKPOINT)
    )
    return None if newer else target.step
