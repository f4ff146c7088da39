"""`ServedStoreCore`: the core of a run in a store whose monitor is a pod of its own."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from datetime import datetime
from typing import Final

from trainsync.api.protocol import (
    CommitNotice,
    ProgressReport,
    ResumePoint,
    SaveKind,
    WeightsReport,
)
from trainsync.api.spec import ResumeFrom, Role
from trainsync.api.status import RolePods, StopSave
from trainsync.monitor.account.places import StoredAccount
from trainsync.monitor.account.recorder import AccountRecorder
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.health import Unhealthy, worst
from trainsync.monitor.commit.observer import Observer, Observers
from trainsync.monitor.core import views
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import CommittedInfo, SaveOwner
from trainsync.monitor.ledger.stop_save import StopAnswer, at_risk, stop_save
from trainsync.monitor.resume.rollback import Rollbacks
from trainsync.monitor.resume.rollback_places import StoreRollbacks
from trainsync.monitor.serving.roster import ServerRoster
from trainsync.monitor.store.core import StoreCore
from trainsync.storage.errors import StorageError
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.saves.claims import Claim

_LOG = logging.getLogger(__name__)
_ACCOUNT_SECONDS: Final = 60.0
"""Between two writes of the account: each is paid for."""
_CLAIMS_KEPT: Final = 1000


class ServedStoreCore(StoreCore):
    """See the module's docstring, and `StoreCore`; what it adds is as in `MonitorCore`.

    Args:
        servers: shown by `view`, and nothing else.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        settings: CoreSettings,
        *,
        clock: Callable[[], datetime],
        authority: Authority,
        observer: Observer,
        executor: Executor | None = None,
        servers: ServerRoster | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._account = AccountRecorder(
            StoredAccount(bucket, authority.gate),
            settings.run_uid,
            clock=clock,
            monotonic=monotonic,
            write_seconds=_ACCOUNT_SECONDS,
        )
        super().__init__(
            bucket,
            settings,
            clock=clock,
            observer=Observers(observer, self._account),
            monotonic=monotonic,
            authority=authority,
            executor=executor,
        )
        self._rollbacks = Rollbacks(
            StoreRollbacks(bucket, settings.run_uid, self._tenure, self._hold.see_right),
            settings.run_uid,
        )
        self._worker.retention.also_kept = self._rollbacks.kept
        self._servers = servers
        self._stop: StopAnswer | None = None
        self._claims: list[Claim] = []
        self.gpus = 0.0
        """GPUs that the run's pods ask for; what is at risk is counted in them."""

    @property
    def revision(self) -> int:
        """See `StoreCore`."""
        return super().revision + self._rollbacks.revision

    @property
    def tells(self) -> bool:
        """Whether `view` is to be shown: once the ledger stands, and where the store refuses."""
        return self.ready or (
            self._hold.may()
            and (self._hold.lost is not None or self._worker.health.text is not None)
        )

    def tick(self) -> None:
        """See `StoreCore`."""
        super().tick()
        if self.ready:
            self._write_account()

    def end(self) -> None:
        """Write what the next monitor goes on from, and would else not know."""
        if self.ready:
            self._write_account(now=True)

    def claim(self, owner: SaveOwner, cluster: str, confirmed_attempt: int | None) -> None:
        """See `StoreCore`."""
        super().claim(owner, cluster, confirmed_attempt)
        self._note(owner, cluster)

    def renew(self, owner: SaveOwner, incarnation: str, reason: str) -> None:
        """See `StoreCore`."""
        super().renew(owner, incarnation, reason)
        successor = SaveOwner(owner.attempt, incarnation)
        cluster = self._worker.ledger.cluster_of(successor)
        assert cluster is not None, "it is in force"
        self._note(successor, cluster)

    def resume_from(self, wanted: ResumeFrom | None) -> None:
        """The present ``spec.resumeFrom``: see `Rollbacks.ask`."""
        self._ready()
        with self._hold.kept():
            self._rollbacks.ask(wanted, self._worker.ledger)

    def check(self, owner: SaveOwner) -> None:
        """Pass if the owner is in force.

        Raises:
            FencedError: another one is.
        """
        self._fence(owner)

    def newest_of_run(self, kind: SaveKind) -> tuple[int | None, CommitNotice | None]:
        """The attempt in force, and the newest save of its training, for those outside of it."""
        self._ready()
        attempt = self._worker.ledger.attempt
        return attempt, None if attempt is None else self._newest_of(attempt, kind)

    def newest_published(self) -> int | None:
        """The version that the Synchronizer says was published last; None: it has not said."""
        return None if self._weights is None else self._weights.trainer_version

    def resume(self, owner: SaveOwner) -> ResumePoint | None:
        """See `StoreCore`."""
        point = super().resume(owner)
        self._account.told_resume(owner.attempt, 0 if point is None else point.step)
        return point

    def expect(self, step: int | None) -> None:
        """Take over the step that the run's status says was committed last; None: none was.

        No rank resumes before this is known.
        """
        self._resuming.expect(step)

    def report_progress(self, owner: SaveOwner, report: ProgressReport) -> None:
        """See `StoreCore`."""
        super().report_progress(owner, report)
        self._account.trained(owner.attempt, report, owner.restarts)

    def report_weights(self, owner: SaveOwner, report: WeightsReport) -> None:
        """See `StoreCore`."""
        super().report_weights(owner, report)
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
        """See `StoreCore`."""
        missing = self._resuming.missing if self.ready else None
        found = [self._hold.lost, self._worker.health.text, missing]
        reasons = (
            None if self._hold.lost is None else Unhealthy.STORE,
            self._worker.health.reason,
            None if missing is None else Unhealthy.MISSING,
        )
        progress, ledger = self._progress.current(), self._worker.ledger
        return views.build(
            ledger,
            error="; ".join(text for text in found if text is not None) or None,
            reason=worst(*reasons),
            leases=views.LeasesView(writers=self._permits.holders, waiting=self._permits.waiters),
            progress=progress,
            steps=self._progress.steps,
            weights=self._weights,
            servers=None if self._servers is None else self._servers.view(),
            lag_allowed=self._settings.lag_allowed,
            stop_save=self.stop_save(),
            at_risk=at_risk(progress, self._progress.first, ledger, self.gpus),
            account=self._account.shown(),
            rollback=self._rollbacks.view,
            restarts=self._restarts.view(ledger.restarts),
        )

    def committed(self) -> list[tuple[SaveKind, CommittedInfo]]:
        """The committed saves that the ledger knows, in no order."""
        return [(kind, info) for kind in SaveKind for info in self._worker.ledger.infos(kind)]

    def claims(self) -> list[Claim]:
        """The claims that this monitor granted, oldest first: the store has the last one alone."""
        return list(self._claims)

    def last_report(self) -> ProgressReport | None:
        """The last progress report as it came."""
        return self._progress.last

    def _note(self, owner: SaveOwner, cluster: str) -> None:
        mine = (owner.attempt, cluster, owner.incarnation)
        if mine not in {(one.attempt, one.cluster, one.incarnation) for one in self._claims}:
            claim = Claim(
                run_uid=self._settings.run_uid,
                attempt=owner.attempt,
                cluster=cluster,
                incarnation=owner.incarnation,
                created_at=self._clock(),
            )
            self._claims = [*self._claims, claim][-_CLAIMS_KEPT:]

    def _rebuild(self) -> None:
        self._rollbacks.begin()  # the later steps go before anything is learnt from the store
        super()._rebuild()

    def _taken(self) -> None:
        self._account.load()

    def _write_account(self, *, now: bool = False) -> None:
        try:
            self._account.write(now=now)
        except (OSError, StorageError) as error:  # no save depends on it; it is written again
            _LOG.warning("the account is not written: %s", error)
            self._observer.io_error("account")
