"""`StoreCore`: ledger, store and clock behind plain synchronous methods.

One thread owns a core (see `trainsync.monitor.commit.core_thread`), so it needs no locks.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from trainsync.api.protocol import (
    CommitNotice,
    DamageReport,
    LoadReport,
    PermitAnswer,
    PermitRequest,
    ProgressReport,
    ResumePoint,
    SaveKind,
    WeightsReport,
)
from trainsync.api.spec import Verify
from trainsync.monitor import errors
from trainsync.monitor.commit.core import CoreSettings
from trainsync.monitor.commit.newest import notice_of
from trainsync.monitor.commit.observer import NullObserver, Observer
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.permits import Permits
from trainsync.monitor.ledger.progress import ProgressTracker
from trainsync.monitor.ledger.saves import Save, SaveOwner
from trainsync.monitor.server import views
from trainsync.monitor.store import origin, tidy
from trainsync.monitor.store.executor import StoreExecutor
from trainsync.monitor.store.requests import StoreSaveRequests
from trainsync.storage.errors import ClaimTakenError, StorageError
from trainsync.storage.layout import step_name
from trainsync.storage.objects.bucket import Bucket
from trainsync.storage.objects.live.term import (
    AttemptOverError,
    Tenure,
    TermLostError,
    check_claim,
)
from trainsync.storage.objects.probe import require_conditional_puts

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.CHECKPOINT
_CHECK_SECONDS: Final = 10.0


class StoreCore:
    """See the module's docstring.

    Every method may raise `MonitorError`. Once another monitor has taken the run's term, every one
    raises `FencedError`, for good: this one commits nothing any more.

    Args:
        clock: now, with a time zone.
        monotonic: seconds that only ever go on.
    """

    def __init__(
        self,
        bucket: Bucket,
        settings: CoreSettings,
        *,
        clock: Callable[[], datetime],
        observer: Observer | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._settings = settings
        self._clock = clock
        self._observer = observer or NullObserver()
        self._monotonic = monotonic
        self._with_digest = settings.verify is Verify.DIGEST
        self._tenure = Tenure(bucket, settings.run_uid, secrets.token_hex(8))
        self._worker = StoreExecutor(
            bucket,
            self._tenure,
            Ledger(timedelta(seconds=settings.save_deadline_seconds)),
            run_uid=settings.run_uid,
            max_to_keep=settings.max_to_keep,
            with_digest=self._with_digest,
            observer=self._observer,
            clock=clock,
        )
        self.saves = StoreSaveRequests(
            bucket, self._worker, self._tenure, settings.run_uid, clock, self._fence, self._act
        )
        """Requests and reports of saves' participants."""
        self._permits = Permits(
            monotonic, self._observer.permit_granted, self._observer.permit_ended
        )
        self._progress = ProgressTracker()
        self._weights: WeightsReport | None = None
        self._holds = False
        self._lost: str | None = None
        self._checked = monotonic()

    # For the thread.

    @property
    def revision(self) -> int:
        """Grows whenever the state of a save or of a permit changes; for long polls."""
        return self._worker.revision + self._permits.revision

    @property
    def ready(self) -> bool:
        """Whether requests can be answered."""
        return self._holds and self._lost is None

    @property
    def busy(self) -> bool:
        """Nothing goes on in other threads."""
        return False

    def tick(self) -> None:
        """Look at the store and act on it; does nothing before the claim, or once fenced.

        What the store refuses is kept for `view`, and tried again by the next tick.
        """
        if not self.ready:
            return
        self._permits.advance()
        try:
            with self._kept():
                if self._monotonic() - self._checked >= _CHECK_SECONDS:
                    self._tenure.check()
                    self._checked = self._monotonic()
                self._worker.scan()
                self._worker.act(self._clock())
        except errors.FencedError:
            return
        except errors.StorageUnavailableError as error:
            self._worker.health.io_error("scan", str(error))

    def poll(self) -> None:
        """Nothing: see `busy`."""

    def end(self) -> None:
        """Nothing is kept that the store does not have."""

    # Requests.

    def claim(self, owner: SaveOwner, cluster: str, confirmed_attempt: int | None) -> None:
        """Put the attempt in force, by conditional puts; complete saves of the one before are
        committed first.

        Args:
            confirmed_attempt: ``status.attempt`` of the run; None where there is no Kubernetes.

        Raises:
            NotYetError: the run is not known to have come to this attempt.
            ClaimRefusedError: a newer attempt is in force, or another incarnation has this one.
            StorageUnavailableError: the store cannot be reached, or honours no conditional puts.
        """
        if confirmed_attempt is not None and owner.attempt > confirmed_attempt:
            raise errors.NotYetError(
                f"attempt {owner.attempt} is newer than attempt {confirmed_attempt} of the run"
            )
        uid = self._settings.run_uid
        with self._kept():
            if not self._holds:
                require_conditional_puts(self._bucket)
                check = partial(
                    check_claim,
                    run_uid=uid,
                    attempt=owner.attempt,
                    cluster=cluster,
                    mine=owner.incarnation,
                )
                self._tenure.take(check)
                self._worker.rebuild()
                self._worker.settle(self._clock())
                self._holds = True
            begins = self._tenure.term.attempt != owner.attempt
            self._tenure.claim(owner.attempt, cluster, owner.incarnation)
            self._worker.rebuild()
        if begins:
            self._permits.renew(quiet=False)
        _LOG.info("attempt %d of cluster %s claimed by %s", owner.attempt, cluster, owner)
        try:
            with self._kept():
                tidy.sweep(self._bucket, self._worker.ledger.owners)
        except errors.StorageUnavailableError as error:  # the next claim sweeps again
            self._worker.health.io_error("sweep", str(error))

    def newest(self, owner: SaveOwner, kind: SaveKind) -> CommitNotice | None:
        """The newest save of the owner's training, or what it resumed from."""
        self._fence(owner)
        ledger, began = self._worker.ledger, self._tenure.term.origin
        own = [info for info in ledger.infos(kind) if info.age[:2] == (True, owner.attempt)]
        if own:
            return notice_of(kind, max(own, key=lambda info: info.step))
        info = None if began is None or began.step is None else ledger.info(kind, began.step)
        return None if info is None else notice_of(kind, info)

    def resume(self, owner: SaveOwner) -> ResumePoint | None:
        """The newest checkpoint that is whole; the pointer is repaired.

        All processes of an attempt are told the same, until the attempt commits a newer one.

        Raises:
            NoValidCheckpointError: something was committed and nothing valid is left.
        """
        self._fence(owner)
        ledger = self._worker.ledger
        own = [info for info in ledger.infos(_KIND) if info.owner in ledger.owners]
        if own:
            newest = max(own, key=lambda info: info.step)
            return _point(newest.step, newest.digest)
        with self._kept():
            found = self._tenure.term.origin
            if found is None:
                # What is set aside must not be put again by the next monitor.
                self._tenure.clear()
                found = origin.choose(
                    self._bucket, ledger, self._observer, with_digest=self._with_digest
                )
                self._tenure.change(origin=found)
        step = found.step
        self._observer.resumed(owner.attempt, step or 0)
        return None if step is None or found.digest is None else _point(step, found.digest)

    def damage(self, owner: SaveOwner, report: DamageReport) -> None:
        """A rank could not load a checkpoint: the next attempt reads it in full first."""
        self._fence(owner)
        with self._kept():
            origin.note_doubt(self._bucket, report)

    def loaded(self, owner: SaveOwner, report: LoadReport) -> None:
        """All ranks of the attempt have loaded the checkpoint that they resume from."""
        self._fence(owner)
        self._observer.loaded(owner.attempt, report)

    def stop_reading(self) -> None:
        """Nothing is read in the background."""

    def write_permit(self, owner: SaveOwner, request: PermitRequest) -> PermitAnswer:
        """Ask to write, ask again, or renew; never blocks."""
        self._fence(owner)
        return self._permits.ask(owner, request)

    def release_permit(self, owner: SaveOwner, holder: str) -> None:
        """The write ended, or the permit is not wanted any more."""
        self._fence(owner)
        self._permits.release(owner, holder)

    def report_progress(self, owner: SaveOwner, report: ProgressReport) -> None:
        """Training is at ``report.step``."""
        self._fence(owner)
        self._progress.report(owner.attempt, report, self._clock())

    def report_weights(self, owner: SaveOwner, report: WeightsReport) -> None:
        """The Synchronizer's view of the explorers."""
        self._fence(owner)
        self._weights = report
        self._observer.weights_reported(report)

    def view(self) -> views.CoreView:
        """The view that status and metrics show."""
        health = self._worker.health
        return views.build(
            self._worker.ledger,
            error=self._lost or health.text,
            reason=health.reason,
            leases=views.LeasesView(writers=self._permits.holders, waiting=self._permits.waiters),
            progress=self._progress.current(),
            steps=self._progress.steps,
            weights=self._weights,
            lag_allowed=self._settings.lag_allowed,
        )

    @property
    def open_saves(self) -> list[Save]:
        """The saves that have neither committed nor failed."""
        return [save for save in self._worker.ledger.saves() if save.open]

    # Inside.

    def _act(self) -> None:
        with self._kept():
            self._worker.act(self._clock())

    def _fence(self, owner: SaveOwner) -> None:
        if self._lost is not None:
            raise errors.FencedError(self._lost)
        if not self._holds:
            raise errors.NotReadyError(f"attempt {owner.attempt} is not claimed yet")
        ledger = self._worker.ledger
        if owner not in ledger.owners:
            raise errors.FencedError(
                f"incarnation {owner.incarnation} of attempt {owner.attempt} is not in force: "
                f"the run is at attempt {ledger.attempt}"
            )

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """What the store or the term refuses, as a `MonitorError`."""
        try:
            yield
        except TermLostError as error:
            self._lost = str(error)
            _LOG.error("%s", error)
            raise errors.FencedError(str(error)) from error
        except (AttemptOverError, ClaimTakenError) as error:
            raise errors.ClaimRefusedError(str(error)) from error
        except StorageError as error:
            raise errors.StorageUnavailableError(str(error)) from error


def _point(step: int, digest: str) -> ResumePoint:
    return ResumePoint(step=step, path=step_name(step), manifest_digest=digest)
