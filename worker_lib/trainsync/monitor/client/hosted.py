"""`MonitorClient` with the monitor in this process, whatever its core keeps saves in."""

import logging
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Final, Generic, Protocol, TypeVar

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
from trainsync.monitor.client.resume_wait import until_verified
from trainsync.monitor.commit import newest
from trainsync.monitor.core.core_thread import Core, CoreThread
from trainsync.monitor.core.views import CoreView
from trainsync.monitor.errors import (
    ClientClosedError,
    MonitorUnavailableError,
    VerifyingError,
)
from trainsync.monitor.ledger import unfinished
from trainsync.monitor.ledger.saves import Save, SaveOwner

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_LOOK_SECONDS: Final = 0.5
_ENDED: Final = (SaveState.COMMITTED, SaveState.ABORTED)


class HostedSaves(Protocol):
    """Requests and reports of saves' participants; see `SaveRequests`."""

    def register(self, owner: SaveOwner, request: SaveRequest) -> SaveStatus:
        """Register a save; idempotent."""
        ...

    def receipt_hint(self, owner: SaveOwner, hint: ReceiptHint) -> None:
        """Look at one receipt now."""
        ...

    def failure(self, owner: SaveOwner, report: FailureReport) -> None:
        """A participant could not save."""
        ...

    def save_status(self, owner: SaveOwner, kind: SaveKind, step: int) -> SaveStatus:
        """The state of a save of this owner."""
        ...


class HostedCore(Core, Protocol):
    """The core of a monitor in this process: see `MonitorCore`, of which these are."""

    @property
    def saves(self) -> HostedSaves:
        """Requests and reports of saves' participants."""
        ...

    @property
    def open_saves(self) -> list[Save]:
        """The saves that have neither committed nor failed."""
        ...

    def newest(self, owner: SaveOwner, kind: SaveKind) -> CommitNotice | None:
        """The newest save of the owner's training."""
        ...

    def resume(self, owner: SaveOwner) -> ResumePoint | None:
        """The newest checkpoint that is whole."""
        ...

    def damage(self, owner: SaveOwner, report: DamageReport) -> None:
        """A rank could not load a committed checkpoint."""
        ...

    def loaded(self, owner: SaveOwner, report: LoadReport) -> None:
        """All ranks have loaded."""
        ...

    def stop_reading(self) -> None:
        """Stop reading a checkpoint. May be called from any thread."""
        ...

    def write_permit(self, owner: SaveOwner, request: PermitRequest) -> PermitAnswer:
        """Ask to write, ask again, or renew."""
        ...

    def release_permit(self, owner: SaveOwner, holder: str) -> None:
        """The permit is not wanted any more."""
        ...

    def report_progress(self, owner: SaveOwner, report: ProgressReport) -> None:
        """Training is at ``report.step``."""
        ...

    def report_weights(self, owner: SaveOwner, report: WeightsReport) -> None:
        """The Synchronizer's view of the explorers."""
        ...

    def view(self) -> CoreView:
        """The view that status and metrics show."""
        ...


CoreT = TypeVar("CoreT", bound=HostedCore)


class HostedMonitorClient(Generic[CoreT]):
    """Calls of a core in a thread of this process; each blocks at most ``timeout_seconds``.

    Args:
        news: told of commits by the core.
        guard: see `CoreThread`.
    """

    def __init__(
        self,
        core: CoreT,
        news: newest.CommitNews,
        *,
        attempt: int,
        incarnation: str,
        tick_seconds: float,
        timeout_seconds: float,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._owner = SaveOwner(attempt, incarnation)
        self._timeout = timeout_seconds
        self._closed = False
        self._news = news
        self._core = core
        self._thread = CoreThread(core, tick_seconds=tick_seconds, guard=guard)

    @property
    def attempt(self) -> int:
        """The attempt this client speaks for."""
        return self._owner.attempt

    @property
    def incarnation(self) -> str:
        """The incarnation this client speaks for."""
        return self._owner.incarnation

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

        def look(core: CoreT) -> ResumePoint | VerifyingError | None:
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
        self._core.stop_reading()
        if not self._thread.close(self._timeout):
            _LOG.warning("the monitor's core did not end within %g s", self._timeout)
            return
        lacking = unfinished.described(self._core.open_saves)
        if lacking:
            _LOG.warning("the monitor ends, and these saves are not committed: %s", lacking)

    def _newer_commit(self, kind: SaveKind, after: newest.Position) -> CommitNotice | None:
        return newest.newer(self._call(lambda core: core.newest(self._owner, kind)), after)

    def _until(
        self,
        ask: Callable[[CoreT], ResultT],
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

    def _call(self, call: Callable[[CoreT], ResultT], timeout: float | None = None) -> ResultT:
        try:
            return self._thread.call(call, self._timeout if timeout is None else timeout)
        except MonitorUnavailableError as error:
            if self._closed:
                raise ClientClosedError("the monitor in this process is closed") from error
            raise
