"""`MonitorClient` with the monitor in this process, for runs without Kubernetes."""

import logging
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

from trainsync.api.protocol import (
    CommitNotice,
    DamageReport,
    FailureReport,
    LoadReport,
    PermitAnswer,
    PermitRequest,
    ProgressReport,
    ReceiptHint,
    ResumePoint,
    SaveKind,
    SaveRequest,
    SaveState,
    SaveStatus,
    WeightsReport,
)
from trainsync.monitor.client.local_fencing import ClaimGate, LocalFence
from trainsync.monitor.client.resume_wait import until_verified
from trainsync.monitor.commit import newest
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.core import CoreSettings, MonitorCore
from trainsync.monitor.commit.core_thread import CoreThread
from trainsync.monitor.errors import (
    ClientClosedError,
    MonitorUnavailableError,
    NotReadyError,
    VerifyingError,
)
from trainsync.monitor.ledger import unfinished
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.server.views import CoreView
from trainsync.storage.layout import RunDirectory

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_LOOK_SECONDS: Final = 0.5
_ENDED: Final = (SaveState.COMMITTED, SaveState.ABORTED)


class LocalMonitorClient:
    """Hosts the run's monitor: its ledger, in a thread of this process.

    One process of a run hosts (rank 0, or the driver); the others use `DiskMonitorClient` with the
    same directory, attempt and incarnation. Calls block at most ``timeout_seconds``. Once a newer
    attempt is claimed in the directory, by another process, nothing is committed any more and
    every call raises `FencedError`.

    Args:
        clock: now, with a time zone; the system's by default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        attempt: int,
        incarnation: str,
        settings: CoreSettings | None = None,
        tick_seconds: float = 0.2,
        timeout_seconds: float = 300.0,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._owner = SaveOwner(attempt, incarnation)
        self._timeout = timeout_seconds
        run, settings = RunDirectory(directory), settings or CoreSettings()
        newer = ClaimGate(run, settings.run_uid, attempt)
        self._fence = LocalFence(run, attempt, incarnation)
        self._claims = False
        self._closed = False
        self._news = newest.CommitNews()

        def gate() -> None:
            newer()
            # Another process may be committing for the attempt before: looking at its files
            # before this attempt is asked for could find one amid a rename, and abort its save.
            if not self._claims:
                raise NotReadyError(f"attempt {attempt} is not claimed yet: call claim first")

        core = MonitorCore(
            run,
            settings,
            clock=clock or (lambda: datetime.now(UTC)),
            authority=Authority(gate=gate, term=lambda: self._fence.others),
            observer=self._news,
        )
        self._stop_reading = core.stop_reading
        self._core = core
        self._thread = CoreThread(core, tick_seconds=tick_seconds, guard=self._guard)

    @property
    def attempt(self) -> int:
        """The attempt this client speaks for."""
        return self._owner.attempt

    @property
    def incarnation(self) -> str:
        """The incarnation this client speaks for."""
        return self._owner.incarnation

    def claim(self, cluster: str) -> None:
        """See `MonitorClient`."""
        self._claims = True

        def claim(core: MonitorCore) -> None:
            with self._fence.claiming():
                core.claim(self._owner, cluster, None)

        self._call(claim)

    def register(self, request: SaveRequest) -> SaveStatus:
        """See `MonitorClient`."""
        return self._call(lambda core: core.saves.register(self._owner, request))

    def receipt(self, hint: ReceiptHint) -> None:
        """See `MonitorClient`."""
        self._call(lambda core: core.saves.receipt_hint(self._owner, hint))

    def failure(self, report: FailureReport) -> None:
        """See `MonitorClient`."""
        self._call(lambda core: core.saves.failure(self._owner, report))

    def save_status(self, kind: SaveKind, step: int, wait_seconds: float = 0.0) -> SaveStatus:
        """See `MonitorClient`."""
        return self._until(
            lambda core: core.saves.save_status(self._owner, kind, step),
            lambda status: status.state in _ENDED,
            wait_seconds,
        )

    def newer_commit(
        self, kind: SaveKind, after: tuple[int, int], wait_seconds: float = 0.0
    ) -> CommitNotice | None:
        """See `CommitClient`."""
        found = self._newer_commit(kind, after)
        if found is None and wait_seconds > 0:
            attempt = self._owner.attempt
            found = self._news.wait(kind, attempt, after, wait_seconds)
            # Another answer, say to an attempt that has resumed meanwhile, or that it is over.
            found = found or self._newer_commit(kind, after)
        return found

    def resume(self) -> ResumePoint | None:
        """See `MonitorClient`."""

        def look(core: MonitorCore) -> ResumePoint | VerifyingError | None:
            try:
                return core.resume(self._owner)
            except VerifyingError as error:
                return error

        def ask(wait: float) -> ResumePoint | None:
            found = self._until(look, lambda found: not isinstance(found, VerifyingError), wait)
            if isinstance(found, VerifyingError):
                raise found
            return found

        return until_verified(ask)

    def report_damage(self, report: DamageReport) -> None:
        """See `MonitorClient`."""
        self._call(lambda core: core.damage(self._owner, report))

    def report_load(self, report: LoadReport) -> None:
        """See `MonitorClient`."""
        self._call(lambda core: core.loaded(self._owner, report))

    def write_permit(self, request: PermitRequest, wait_seconds: float = 0.0) -> PermitAnswer:
        """See `PermitClient`."""
        return self._until(
            lambda core: core.write_permit(self._owner, request),
            lambda answer: answer.granted or request.held,
            wait_seconds,
        )

    def release_permit(self, holder: str) -> None:
        """See `PermitClient`."""
        self._call(lambda core: core.release_permit(self._owner, holder))

    def report_progress(self, report: ProgressReport) -> None:
        """See `MonitorClient`."""
        self._call(lambda core: core.report_progress(self._owner, report))

    def report_weights(self, report: WeightsReport) -> None:
        """See `MonitorClient`."""
        self._call(lambda core: core.report_weights(self._owner, report))

    def view(self) -> CoreView:
        """The view that ``kubectl get trainingrun`` would show, for local runs."""
        return self._call(lambda core: core.view())

    def finish(self, seconds: float, ranks: Collection[int]) -> None:
        """Wait until registered saves have ended; not for those that only ``ranks`` could end.

        Args:
            seconds: to wait at most.
            ranks: those of this process, which write nothing any more.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            revision, awaited = self._call(
                lambda core: (core.revision, unfinished.awaited(core.open_saves, ranks))
            )
            if not awaited:
                return
            self._thread.wait_change(revision, min(left, _LOOK_SECONDS))

    def close(self) -> None:
        """Commit what is complete, then end the thread; later calls raise `ClientClosedError`.

        Incomplete saves are named in the log: they are not committed any more.
        """
        self._closed = True
        self._news.close()
        self._stop_reading()
        if not self._thread.close(self._timeout):
            _LOG.warning("the monitor's core did not end within %g s", self._timeout)
            return
        lacking = unfinished.described(self._core.open_saves)
        if lacking:
            _LOG.warning("the monitor ends, and these saves are not committed: %s", lacking)

    def _guard(self) -> AbstractContextManager[None]:
        # Before the claim it does nothing, so it need not wait, and leaves nothing behind.
        return self._fence.own() if self._claims else nullcontext()

    def _newer_commit(self, kind: SaveKind, after: newest.Position) -> CommitNotice | None:
        return newest.newer(self._call(lambda core: core.newest(self._owner, kind)), after)

    def _until(
        self,
        ask: Callable[[MonitorCore], ResultT],
        done: Callable[[ResultT], bool],
        seconds: float,
    ) -> ResultT:
        """Ask, and again after each change, until ``done`` with the answer, or for ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            revision, answer = self._call(lambda core: (core.revision, ask(core)))
            left = end - time.monotonic()
            if done(answer) or left <= 0:
                return answer
            self._thread.wait_change(revision, left)

    def _call(self, call: Callable[[MonitorCore], ResultT]) -> ResultT:
        try:
            return self._thread.call(call, self._timeout)
        except MonitorUnavailableError as error:
            if self._closed:
                raise ClientClosedError("the monitor in this process is closed") from error
            raise
