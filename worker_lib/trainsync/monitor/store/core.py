"""`StoreCore`: ledger, store and clock behind plain synchronous methods.

One thread owns a core (see `trainsync.monitor.core.core_thread`), so it needs no locks.

It has no account but in a pod. State dicts of steps that are trained again are superseded; readers
have no leases, so each one stays for as long as a reader may be at it.
"""

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime, timedelta
from functools import partial

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
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.health import Unhealthy
from trainsync.monitor.commit.newest import notice_of
from trainsync.monitor.commit.observer import NullObserver, Observer
from trainsync.monitor.core import views
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.core.restarts import Restarts
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.permits import Permits
from trainsync.monitor.ledger.progress import ProgressTracker
from trainsync.monitor.ledger.saves import Save, SaveOwner
from trainsync.monitor.store import origin
from trainsync.monitor.store.executor import StoreExecutor
from trainsync.monitor.store.requests import StoreSaveRequests
from trainsync.monitor.store.resuming import StoreResuming
from trainsync.monitor.store.sweeps import Sweeps
from trainsync.monitor.store.term_hold import TermHold
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live.term import Tenure, check_claim
from trainsync.storage.saves import incarnations

_LOG = logging.getLogger(__name__)


class StoreCore:
    """See the module's docstring.

    Every method may raise `MonitorError`. Once another monitor has taken the run's term, every one
    raises `FencedError`: this one commits nothing any more, until ``authority`` is won anew, or was
    held for a while since.

    Args:
        clock: now, with a time zone.
        monotonic: seconds that only ever go on.
        authority: whether this monitor may take the run's term, which it then does by itself; None
            in a local run, whose claim takes it.
        executor: where objects are read in full; in the calling thread when None.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        settings: CoreSettings,
        *,
        clock: Callable[[], datetime],
        observer: Observer | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        authority: Authority | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._bucket = bucket
        self._settings = settings
        self._clock = clock
        self._observer = observer or NullObserver()
        self._tenure = Tenure(bucket, settings.run_uid, secrets.token_hex(8))
        self._worker = StoreExecutor(
            bucket,
            self._tenure,
            Ledger(timedelta(seconds=settings.save_deadline_seconds)),
            run_uid=settings.run_uid,
            max_to_keep=settings.max_to_keep,
            with_digest=settings.verify is Verify.DIGEST,
            reading_seconds=settings.reading_seconds,
            observer=self._observer,
            clock=clock,
            executor=executor,
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
        self._restarts = Restarts(self._observer)
        self._resuming = StoreResuming(
            bucket,
            self._worker,
            self._tenure,
            self._observer,
            with_digest=settings.verify is Verify.DIGEST,
            has_status=settings.has_status,
            executor=executor,
        )
        self._authority = authority
        self._hold = TermHold(
            bucket, self._tenure, settings.run_uid, authority=authority, monotonic=monotonic
        )
        self._sweeps = Sweeps(
            bucket,
            self._worker,
            self._hold,
            reading_seconds=settings.reading_seconds,
            monotonic=monotonic,
        )

    # For the thread.

    @property
    def revision(self) -> int:
        """Grows whenever the state of a save or of a permit changes; for long polls."""
        return self._worker.revision + self._permits.revision + self._resuming.revision

    @property
    def ready(self) -> bool:
        """Whether requests can be answered."""
        return self._hold.ready

    @property
    def busy(self) -> bool:
        """Whether objects are being read: a poll soon will have something to do."""
        return self._worker.busy or self._resuming.busy

    def tick(self) -> None:
        """Look at the store and act on it; does nothing before the claim, or once fenced.

        With an authority it takes the run's term first. What the store refuses is kept for `view`,
        and tried again by a later tick.
        """
        try:
            self._ready()
        except errors.StorageUnavailableError as error:
            self._worker.health.io_error("open", str(error))
            return
        except errors.MonitorError:
            return
        if not self.ready:
            return
        self._permits.advance()
        try:
            with self._hold.kept():
                self._hold.check_now_and_then()
                self._worker.scan()
                self._worker.act(self._clock())
            self._sweeps.advance()
        except errors.FencedError:
            return
        except errors.StorageUnavailableError as error:
            self._worker.health.io_error("scan", str(error))

    def poll(self) -> None:
        """Act on objects that were read since."""
        if not self.ready:
            return
        self._resuming.poll()
        if self._worker.has_news:
            try:
                self._act()
            except errors.MonitorError:
                return  # the next tick meets it too, and keeps it

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
            NotReadyError: a save of the attempt before is being read; ask again.
            StorageUnavailableError: the store cannot be reached, or honours no conditional puts.
        """
        self._ready()
        if self._hold.lost is not None and self._authority is not None:
            raise errors.FencedError(self._hold.lost)
        if confirmed_attempt is not None and owner.attempt > confirmed_attempt:
            raise errors.NotYetError(
                f"attempt {owner.attempt} is newer than attempt {confirmed_attempt} of the run"
            )
        if confirmed_attempt is not None and owner.attempt < confirmed_attempt:
            raise errors.ClaimRefusedError(
                f"attempt {owner.attempt} is over: the run is at attempt {confirmed_attempt}"
            )
        with self._hold.kept():
            if not self._hold.holds:
                check = partial(
                    check_claim,
                    run_uid=self._settings.run_uid,
                    attempt=owner.attempt,
                    cluster=cluster,
                    mine=owner.incarnation,
                )
                with self._hold.learning():
                    self._hold.take(check, self._rebuild)
                    self._worker.settle(self._clock())
            begins = self._tenure.term.attempt != owner.attempt
            if begins and self._authority is not None:
                self._settle_last()
            self._tenure.claim(owner.attempt, cluster, owner.incarnation)
            with self._hold.learning():
                self._rebuild()
        if begins:
            self._resuming.forget()
            self._permits.renew(quiet=False)
        _LOG.info("attempt %d of cluster %s claimed by %s", owner.attempt, cluster, owner)
        self._sweeps.begin()

    def renew(self, owner: SaveOwner, incarnation: str, reason: str) -> None:
        """Restart the owner's attempt in place: its successor of that name is in force from now on.

        As with a new attempt, complete saves are committed first. The rest is aborted, by one
        conditional put of the term the owner is fenced, and what it had put is swept. What to
        resume from is decided anew. The same request again changes nothing.

        Raises:
            FencedError: the owner is not in force.
            InvalidRequestError: the name is none of a successor of the owner's.
            NotReadyError: a save of the owner is being read; ask again.
            StorageUnavailableError: the store cannot be reached; ask again.
        """
        self._ready()
        successor = SaveOwner(owner.attempt, incarnation)
        if not incarnations.succeeds(incarnation, owner.incarnation):
            raise errors.InvalidRequestError(
                f"{incarnation} is no name of a successor of incarnation {owner.incarnation}"
            )
        if self._hold.holds_still and successor in self._worker.ledger.owners:
            return  # the answer to the request before was lost
        self._fence(owner)
        cluster = self._worker.ledger.cluster_of(owner)
        assert cluster is not None, "the owner is in force"
        with self._hold.kept():
            self._settle_last()
            self._hold.see_right()  # also now: a store that is away costs no open save
            why = f"the attempt is restarted in place ({successor.restarts})"
            self._worker.abandon(owner, why, self._clock())
            self._hold.see_right()
            self._tenure.renew(cluster, owner.incarnation, incarnation)
        self._worker.grant(cluster, successor)
        self._resuming.forget()
        self._permits.renew(quiet=False)  # its processes are gone, or fenced
        self._restarts.note(successor, self._clock(), reason)
        self._sweeps.begin()

    def newest(self, owner: SaveOwner, kind: SaveKind) -> CommitNotice | None:
        """The newest save of the owner's training, or what it resumed from."""
        self._fence(owner)
        return self._newest_of(owner.attempt, kind)

    def _newest_of(self, attempt: int, kind: SaveKind) -> CommitNotice | None:
        ledger, began = self._worker.ledger, self._tenure.term.origin
        # Checkpoints of before a restart in place are what the attempt goes on from.
        length = 3 if kind is SaveKind.STATE_DICT else 2
        age = (True, attempt, ledger.restarts)[:length]
        own = [info for info in ledger.infos(kind) if info.age[:length] == age]
        if own:
            return notice_of(kind, max(own, key=lambda info: info.step))
        if began is None or began.step is None:
            return None
        if kind is SaveKind.CHECKPOINT:
            info = ledger.info(kind, began.step)
        else:
            with self._hold.kept():
                info = self._worker.weights_of(began.step)
        return None if info is None else notice_of(kind, info)

    def resume(self, owner: SaveOwner) -> ResumePoint | None:
        """The newest checkpoint that is whole; the pointer is repaired.

        See `StoreResuming.answer`.
        """
        self._fence(owner)
        with self._hold.kept():
            return self._resuming.answer(owner)

    def damage(self, owner: SaveOwner, report: DamageReport) -> None:
        """A rank could not load a checkpoint: the next attempt reads it in full first."""
        self._fence(owner)
        with self._hold.kept():
            origin.request_quarantine(self._bucket, report)

    def loaded(self, owner: SaveOwner, report: LoadReport) -> None:
        """All ranks of the attempt have loaded the checkpoint that they resume from."""
        self._fence(owner)
        self._observer.loaded(owner.attempt, report)

    def stop_reading(self) -> None:
        """Nothing: what is read for this monitor ends with its executor."""

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
        self._progress.report(owner.attempt, report, self._clock(), owner.restarts)

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
            error=self._hold.lost or health.text,
            reason=Unhealthy.STORE if self._hold.lost is not None else health.reason,
            leases=views.LeasesView(writers=self._permits.holders, waiting=self._permits.waiters),
            progress=self._progress.current(),
            steps=self._progress.steps,
            weights=self._weights,
            lag_allowed=self._settings.lag_allowed,
            restarts=self._restarts.view(self._worker.ledger.restarts),
        )

    @property
    def open_saves(self) -> list[Save]:
        """The saves that have neither committed nor failed."""
        return [save for save in self._worker.ledger.saves() if save.open]

    # Inside.

    def _act(self) -> None:
        with self._hold.kept():
            self._worker.act(self._clock())

    def _ready(self) -> None:
        """Take the run's term, if the authority was won since: see `TermHold.seize`."""
        if self._hold.seize(self._begin):
            self._sweeps.plan()  # of what a monitor before this one had superseded
            self._taken()

    def _begin(self) -> None:
        self._rebuild()
        # Writers of the attempt in force may hold permits that this monitor does not know of.
        self._permits.renew(quiet=self._worker.ledger.attempt is not None)
        self._resuming.begin()

    def _rebuild(self) -> None:
        """Learn what the store has; the attempt in force is claimed by now."""
        self._worker.rebuild()

    def _taken(self) -> None:
        """Another monitor may have been at work since this one was."""

    def _settle_last(self) -> None:
        """Commit what is complete of the attempt that is about to be superseded."""
        self._worker.scan()
        self._worker.settle(self._clock())
        if self._worker.busy:
            raise errors.NotReadyError("a save of the attempt before is being read; ask again")

    def _fence(self, owner: SaveOwner) -> None:
        self._ready()
        if self._hold.lost is not None:
            raise errors.FencedError(self._hold.lost)
        if not self._hold.holds:
            raise errors.NotReadyError(f"attempt {owner.attempt} is not claimed yet")
        ledger = self._worker.ledger
        if owner not in ledger.owners:
            raise errors.FencedError(
                f"incarnation {owner.incarnation} of attempt {owner.attempt} is not in force: "
                f"the run is at attempt {ledger.attempt}"
            )
