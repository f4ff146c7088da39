"""`MonitorCore`: ledger, disk and clock behind plain synchronous methods.

One thread owns a core (see `trainsync.monitor.core.core_thread`), so it needs no locks. FastAPI,
the Ray actor and the in-process client are thin fronts of it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime, timedelta

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
from trainsync.api.spec import SAVE_DEADLINE_SECONDS, ResumeFrom, Role
from trainsync.api.spec import Verify as VerifyMode
from trainsync.api.status import RolePods, StopSave
from trainsync.monitor import errors
from trainsync.monitor.account.places import VolumeAccount
from trainsync.monitor.account.recorder import AccountRecorder
from trainsync.monitor.commit import newest as commits
from trainsync.monitor.commit.committer import Authority, Committer
from trainsync.monitor.commit.executor import SaveExecutor
from trainsync.monitor.commit.health import Unhealthy, worst
from trainsync.monitor.commit.observer import NullObserver, Observer, Observers
from trainsync.monitor.commit.removal import Removal
from trainsync.monitor.core import views
from trainsync.monitor.core.restarts import Restarts
from trainsync.monitor.core.save_requests import SaveRequests
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.permits import Permits
from trainsync.monitor.ledger.progress import ProgressTracker
from trainsync.monitor.ledger.saves import CommittedInfo, Save, SaveOwner
from trainsync.monitor.ledger.stop_save import StopAnswer, at_risk, stop_save
from trainsync.monitor.resume import claiming
from trainsync.monitor.resume.answers import ResumeAnswers
from trainsync.monitor.resume.choice import Resuming
from trainsync.monitor.resume.digest_reader import DigestReader
from trainsync.monitor.resume.rollback import Rollbacks
from trainsync.monitor.resume.rollback_places import VolumeRollbacks
from trainsync.monitor.serving.roster import ServerRoster
from trainsync.storage import atomic
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import LeaseBook
from trainsync.storage.saves import claims, incarnations

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoreSettings:
    """Settings of a run's saves."""

    run_uid: str = claims.LOCAL_UID
    max_to_keep: int | None = None
    verify: VerifyMode = VerifyMode.SIZE
    save_deadline_seconds: float = SAVE_DEADLINE_SECONDS
    io_tries: int = 5
    lag_allowed: int = 1
    """Explorers this many versions behind still count as in sync."""
    reading_seconds: float = 600.0
    """How long a reader may be at a state dict that it cannot lease, in a bucket."""
    has_status: bool = False
    """Whether a status remembers the run besides the volume; see `MonitorCore.expect`."""


class MonitorCore:
    """See the module's docstring.

    Args:
        clock: now, with a time zone.
        monotonic: seconds that only ever go on: leases are judged by them.
        executor: where files are checked; in the calling thread when None.
        deleter: where what was discarded is deleted, which can take long; as ``executor``.
        servers: shown by `view`, and nothing else.

    Every method may raise `MonitorError`; `StorageUnavailableError` carries an `OSError`.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: CoreSettings,
        *,
        clock: Callable[[], datetime],
        authority: Authority | None = None,
        observer: Observer | None = None,
        executor: Executor | None = None,
        deleter: Executor | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        servers: ServerRoster | None = None,
    ) -> None:
        self._run = run
        self._settings = settings
        self._clock = clock
        self._authority = authority or Authority()
        book = LeaseBook(run)

        def leased() -> set[int]:
            return book.steps(monotonic())

        committer = Committer(
            run,
            run_uid=settings.run_uid,
            with_digest=settings.verify is VerifyMode.DIGEST,
            authority=self._authority,
            leased=leased,
        )
        self._account = AccountRecorder(
            VolumeAccount(run, self._authority.gate),
            settings.run_uid,
            clock=clock,
            monotonic=monotonic,
        )
        self._observer = Observers(observer or NullObserver(), self._account)
        self._worker = SaveExecutor(
            run,
            committer,
            Removal(run, authority=self._authority, leased=leased),
            Ledger(timedelta(seconds=settings.save_deadline_seconds)),
            book,
            max_to_keep=settings.max_to_keep,
            io_tries=settings.io_tries,
            observer=self._observer,
            executor=executor,
            monotonic=monotonic,
            deleter=deleter,
            clock=clock,
        )
        self.saves = SaveRequests(run, self._worker, settings.run_uid, clock, self._fence)
        """Requests and reports of saves' participants."""
        self._reader = DigestReader(run, monotonic=monotonic)
        self._resuming = Resuming(
            run,
            self._worker,
            self._reader,
            run_uid=settings.run_uid,
            with_digest=settings.verify is VerifyMode.DIGEST,
            max_to_keep=settings.max_to_keep,
            authority=self._authority,
            observer=self._observer,
            monotonic=monotonic,
        )
        self._answers = ResumeAnswers(
            run,
            self._resuming,
            run_uid=settings.run_uid,
            has_status=settings.has_status,
            observer=self._observer,
            gate=self._authority.gate,
        )
        self._rollbacks = Rollbacks(
            VolumeRollbacks(run, settings.run_uid, self._authority.gate, leased), settings.run_uid
        )
        self._permits = Permits(
            monotonic, self._observer.permit_granted, self._observer.permit_ended
        )
        self._term: int | None = None
        self._progress = ProgressTracker()
        self._weights: WeightsReport | None = None
        self._volume: views.VolumeView | None = None
        self._stop: StopAnswer | None = None
        self._servers = servers
        self._restarts = Restarts(self._observer)
        self.gpus = 0.0
        """GPUs that the run's pods ask for; what is at risk is counted in them."""

    @property
    def revision(self) -> int:
        """Grows whenever the state of a save or of a permit changes; for long polls."""
        parts = (self._worker, self._permits, self._resuming, self._rollbacks)
        return sum(part.revision for part in parts)

    def tick(self) -> None:
        """Scan the disk and act on it.

        Does nothing while the gate is closed. An `OSError` of the volume is kept for `view` and
        the next tick tries again; anything else unexpected is raised.
        """
        try:
            self._ready()
            self._permits.advance()
            self._worker.tick(self._clock())
            self._resuming.advance()
            self._volume = views.volume_of(self._run.root)
            self._write_account()
        except (errors.NotReadyError, errors.FencedError):
            return
        except errors.MonitorError as error:
            self._worker.health.io_error("scan", str(error))

    def poll(self) -> None:
        """Act on files checked since, without a look at the disk."""
        try:
            self._ready()
            self._worker.act(self._clock())
            self._resuming.advance()
        except errors.MonitorError:
            return  # the next tick meets it too, and keeps it

    def end(self) -> None:
        """Write what the next monitor goes on from, and would else not know. Raises
        `MonitorError`."""
        self._ready()
        self._write_account(now=True)

    def claim(self, owner: SaveOwner, cluster: str, confirmed_attempt: int | None) -> None:
        """Grant the attempt to this incarnation: see `trainsync.monitor.resume.claiming.claim`."""
        self._ready()
        with errors.storage("claim"):
            goes_back = self._rollbacks.is_due(owner.attempt)
            if goes_back:
                self._rollbacks.check_readers()
            begins = claiming.claim(
                self._run,
                self._worker,
                owner,
                cluster,
                confirmed_attempt,
                run_uid=self._settings.run_uid,
                clock=self._clock,
                gate=self._authority.gate,
            )
        if begins:
            self._answers.forget()
            self._resuming.granted()
            # Writers of older attempts are fenced; the new attempt holds no permit yet.
            self._permits.renew(quiet=False)
        if goes_back:
            self._term = None  # the later steps go before anything is learnt from the disk
            self._ready()

    def renew(self, owner: SaveOwner, incarnation: str, reason: str) -> None:
        """Restart the owner's attempt in place: its successor of that name is in force from now on.

        The owner is fenced as one of an older attempt is; what it had not completed is aborted, and
        the step to resume from is decided anew. The same request again changes nothing.

        Raises:
            FencedError: the owner is not in force.
            InvalidRequestError: the name is none of a successor of the owner's.
        """
        self._ready()
        successor = SaveOwner(owner.attempt, incarnation)
        if not incarnations.succeeds(incarnation, owner.incarnation):
            raise errors.InvalidRequestError(
                f"{incarnation} is no name of a successor of incarnation {owner.incarnation}"
            )
        if successor in self._worker.ledger.owners:
            return  # the answer to the request before was lost
        self._fence(owner)
        with errors.storage("restart in place"):
            claiming.renew(
                self._run,
                self._worker,
                owner,
                successor,
                run_uid=self._settings.run_uid,
                clock=self._clock,
                gate=self._authority.gate,
            )
        self._answers.forget()
        self._resuming.granted()
        self._permits.renew(quiet=False)  # its processes are gone, or fenced
        self._restarts.note(successor, self._clock(), reason)

    def resume_from(self, wanted: ResumeFrom | None) -> None:
        """The present ``spec.resumeFrom``: see `Rollbacks.ask`."""
        self._ready()
        with errors.storage("rollback"):
            self._rollbacks.ask(wanted, self._worker.ledger)

    def check(self, owner: SaveOwner) -> None:
        """Pass if the owner is in force.

        Raises:
            FencedError: another one is.
        """
        self._fence(owner)

    def newest(self, owner: SaveOwner, kind: SaveKind) -> CommitNotice | None:
        """The newest save of the owner's training: see `trainsync.monitor.commit.newest.newest`."""
        self._fence(owner)
        with errors.storage("newest"):
            ledger, run_uid = self._worker.ledger, self._settings.run_uid
            return commits.newest(self._run, ledger, run_uid, owner.attempt, kind, ledger.restarts)

    def newest_of_run(self, kind: SaveKind) -> tuple[int | None, CommitNotice | None]:
        """The attempt in force, and the newest save of its training, for those outside of it."""
        self._ready()
        if (attempt := self._worker.ledger.attempt) is None:
            return None, None
        with errors.storage("newest"):
            ledger, run_uid = self._worker.ledger, self._settings.run_uid
            newest = commits.newest(self._run, ledger, run_uid, attempt, kind, ledger.restarts)
            return attempt, newest

    def newest_published(self) -> int | None:
        """The version that the Synchronizer says was published last; None: it has not said."""
        return None if self._weights is None else self._weights.trainer_version

    def resume(self, owner: SaveOwner) -> ResumePoint | None:
        """The newest checkpoint that is whole; the pointer is repaired.

        All ranks of an attempt are told the same, until the attempt commits a newer one.

        Raises:
            VerifyingError: it is read first; ask again.
            NoValidCheckpointError: something was committed and nothing valid is left.
            ResumeLostError: what this attempt resumed from is found damaged since.
        """
        self._fence(owner)
        point = self._answers.answer(owner, self._worker.ledger)
        self._account.told_resume(owner.attempt, 0 if point is None else point.step)
        return point

    def expect(self, step: int | None) -> None:
        """Take over the step that the run's status says was committed last; None: none was.

        Where `CoreSettings.has_status` is set, no rank resumes before this is known.
        """
        self._answers.expect(step)

    def damage(self, owner: SaveOwner, report: DamageReport) -> None:
        """A rank could not load a committed checkpoint: it is read, and set aside if it is bad."""
        self._fence(owner)
        with errors.storage("damage report"):
            self._resuming.report_damage(owner, report)

    def loaded(self, owner: SaveOwner, report: LoadReport) -> None:
        """All ranks of the attempt have loaded the checkpoint that they resume from."""
        self._fence(owner)
        self._observer.loaded(owner.attempt, report)

    def stop_reading(self) -> None:
        """Stop reading a checkpoint. May be called from any thread."""
        self._reader.stop()

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
        self._account.trained(owner.attempt, report, owner.restarts)

    def report_weights(self, owner: SaveOwner, report: WeightsReport) -> None:
        """The Synchronizer's view of the explorers."""
        self._fence(owner)
        self._weights = report
        self._observer.weights_reported(report)
        self._account.synchronized(owner.attempt, report)

    def answer_stop(self, owner: SaveOwner, since: datetime | None, step: int | None) -> None:
        """The trainers save ``step`` for the request of ``since``; the first answer holds."""
        self._fence(owner)
        if since is None or step is None:
            return
        if self._stop is None or (self._stop.since, self._stop.owner) != (since, owner):
            self._stop = StopAnswer(since, owner, step)

    def stop_save(self) -> StopSave | None:
        """The state of the save that was asked for last."""
        return stop_save(self._stop, self._worker.ledger)

    def see_pods(self, pods: Mapping[Role, RolePods], phase: str | None) -> None:
        """The run's Ray pods, and its phase, as the operator sees them; see `AccountRecorder`."""
        if self.ready:
            self._account.see_pods(pods, phase, gpus=self.gpus)

    def view(self) -> views.CoreView:
        """The view that status and metrics show."""
        ledger = self._worker.ledger
        missing = self._resuming.missing if self.ready else None
        found = [self._worker.health.text, missing]
        return views.build(
            ledger,
            error="; ".join(text for text in found if text is not None) or None,
            reason=worst(
                self._worker.health.reason, None if missing is None else Unhealthy.MISSING
            ),
            leases=views.LeasesView(
                readers=self._worker.readers,
                writers=self._permits.holders,
                waiting=self._permits.waiters,
            ),
            progress=self._progress.current(),
            steps=self._progress.steps,
            volume=self._volume,
            weights=self._weights,
            servers=None if self._servers is None else self._servers.view(),
            lag_allowed=self._settings.lag_allowed,
            stop_save=self.stop_save(),
            at_risk=at_risk(self._progress.current(), self._progress.first, ledger, self.gpus),
            rollback=self._rollbacks.view,
            account=self._account.shown(),
            restarts=self._restarts.view(ledger.restarts),
        )

    @property
    def open_saves(self) -> list[Save]:
        """The saves that have neither committed nor failed."""
        return [save for save in self._worker.ledger.saves() if save.open]

    def committed(self) -> list[tuple[SaveKind, CommittedInfo]]:
        """Every committed save on the volume, in no order."""
        return [(kind, info) for kind in SaveKind for info in self._worker.ledger.infos(kind)]

    def claims(self) -> list[claims.Claim]:
        """The claims of attempts by incarnations, oldest first, read from the volume."""
        with errors.storage("claims"):
            return claims.read_claims(self._run, self._settings.run_uid)

    def last_report(self) -> ProgressReport | None:
        """The last progress report as it came."""
        return self._progress.last

    @property
    def busy(self) -> bool:
        """Whether files are being read: a tick soon will have something to do."""
        return self._worker.busy or self._resuming.busy

    @property
    def tells(self) -> bool:
        """Whether `view` is to be shown: once the ledger stands."""
        return self.ready

    @property
    def ready(self) -> bool:
        """Whether requests can be answered: the gate is open and the ledger stands."""
        try:
            self._authority.gate()
        except errors.MonitorError:
            return False
        return self._term == self._authority.term()

    def _ready(self) -> None:
        self._authority.gate()
        term = self._authority.term()
        if term != self._term:
            with errors.storage("rebuild"):
                if not self._run.root.is_dir():  # it may be a link of the user's
                    atomic.make_directory(self._run.root)
                self._rollbacks.begin()
                self._worker.rebuild(self._settings.run_uid, self._clock())
                self._resuming.begin()
            self._account.load()
            self._answers.forget()
            # Writers of the attempt in force may hold permits that this monitor does not know of.
            self._permits.renew(quiet=self._worker.ledger.attempt is not None)
            self._term = term

    def _write_account(self, *, now: bool = False) -> None:
        try:
            self._account.write(now=now)
        except (OSError, StorageError) as error:  # no save depends on it; it is written again
            _LOG.warning("the account is not written: %s", error)
            self._observer.io_error("account")

    def _fence(self, owner: SaveOwner) -> None:
        self._ready()
        ledger = self._worker.ledger
        if owner in ledger.owners:
            return
        if ledger.attempt is None:
            raise errors.FencedError(f"attempt {owner.attempt} is not claimed yet")
        raise errors.FencedError(
            f"incarnation {owner.incarnation} of attempt {owner.attempt} is not in force: "
            f"the run is at attempt {ledger.attempt}"
        )
