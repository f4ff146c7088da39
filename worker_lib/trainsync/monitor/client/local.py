"""`MonitorClient` with the monitor in this process, for runs without Kubernetes."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from trainsync.monitor.client.hosted import HostedMonitorClient
from trainsync.monitor.client.local_fencing import ClaimGate, LocalFence
from trainsync.monitor.commit import newest
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.layout import RunDirectory


class LocalMonitorClient(HostedMonitorClient[MonitorCore]):
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
        run, settings = RunDirectory(directory), settings or CoreSettings()
        newer = ClaimGate(run, settings.run_uid, attempt)
        self._fence = LocalFence(run, attempt, incarnation)
        self._claims = False
        news = newest.CommitNews()

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
            observer=news,
        )
        super().__init__(
            core,
            news,
            attempt=attempt,
            incarnation=incarnation,
            tick_seconds=tick_seconds,
            timeout_seconds=timeout_seconds,
            guard=self._guard,
        )

    def claim(self, cluster: str) -> None:
        """See `MonitorClient`."""
        self._claims = True

        def claim(core: MonitorCore) -> None:
            with self._fence.claiming():
                core.claim(self._owner, cluster, None)

        self._call(claim)

    def renew(self, successor: str, reason: str) -> "LocalMonitorClient":
        """See `RenewalClient`. The two share the monitor: closing one of them ends it."""
        self._call(lambda core: core.renew(self._owner, successor, reason))
        renewed = copy.copy(self)
        renewed._owner = SaveOwner(self.attempt, successor)
        return renewed

    def _guard(self) -> AbstractContextManager[None]:
        # Before the claim it does nothing, so it need not wait, and leaves nothing behind.
        return self._fence.own() if self._claims else nullcontext()
