"""Which `MonitorClient` a process uses, and whose write permits."""

import os
import socket
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trainsync.api import env
from trainsync.api.spec import SaveStrategy
from trainsync.checkpoint.save.permits import FilePermits, MonitorPermits, WritePermits, scope_of
from trainsync.monitor.client.base import MonitorClient, PermitClient
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.http import HttpMonitorClient
from trainsync.monitor.errors import ClaimRefusedError
from trainsync.runtime.errors import JoinError
from trainsync.runtime.settings import RunSettings
from trainsync.storage.errors import LockTimeoutError
from trainsync.storage.hosting import Hosting
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.of_run import MONITOR_LIMITS, open_run_store
from trainsync.storage.saves.claims import next_attempt

if TYPE_CHECKING:
    from trainsync.monitor.core.core import CoreSettings


@runtime_checkable
class HostingClient(Protocol):
    """A client whose monitor is in this process, and ends with it."""

    def finish(self, seconds: float, ranks: Collection[int]) -> None:
        """Wait until what was saved has committed; see `LocalMonitorClient`."""
        ...


def open_client(settings: RunSettings, *, hosting: bool) -> MonitorClient:
    """The client for the settings' attempt and incarnation.

    Args:
        hosting: of a local run: whether the monitor lives in this process.
    """
    if settings.attempt is None or settings.incarnation is None:
        raise JoinError("a monitor client speaks for an attempt and an incarnation")
    if settings.monitor_url is not None:
        return HttpMonitorClient(
            settings.monitor_url,
            attempt=settings.attempt,
            incarnation=settings.incarnation,
            token_file=settings.token_file,
        )
    if settings.store is not None:
        return _open_in_store(settings, settings.store, hosting=hosting)
    if not hosting:
        return DiskMonitorClient(
            settings.directory,
            attempt=settings.attempt,
            incarnation=settings.incarnation,
            run_uid=settings.uid,
            verify=settings.checkpoint.verify,
        )
    # Here, and not above: joining processes do without the monitor's half.
    from trainsync.monitor.client.local import LocalMonitorClient

    return LocalMonitorClient(
        settings.directory,
        attempt=settings.attempt,
        incarnation=settings.incarnation,
        settings=_core_settings(settings),
    )


def _open_in_store(settings: RunSettings, store: str, *, hosting: bool) -> MonitorClient:
    from trainsync.monitor.client.store import StoreMonitorClient, StoreRankClient

    assert settings.attempt is not None and settings.incarnation is not None
    if not hosting:
        return StoreRankClient(
            open_run_store(store),
            attempt=settings.attempt,
            incarnation=settings.incarnation,
            run_uid=settings.uid,
        )
    return StoreMonitorClient(
        open_run_store(store, MONITOR_LIMITS),
        attempt=settings.attempt,
        incarnation=settings.incarnation,
        settings=_core_settings(settings),
    )


def _core_settings(settings: RunSettings) -> "CoreSettings":
    from trainsync.monitor.core.core import CoreSettings

    return CoreSettings(
        run_uid=settings.uid,
        max_to_keep=settings.checkpoint.max_to_keep,
        verify=settings.checkpoint.verify,
        save_deadline_seconds=settings.checkpoint.save_timeout,
        reading_seconds=settings.sync.timeout,
    )


def open_permits(
    settings: RunSettings, client: MonitorClient, environ: Mapping[str, str] = os.environ
) -> WritePermits | None:
    """Asks for a permit before each write, as the save strategy says; None when every rank may.

    On Kubernetes the monitor grants permits; the processes of a local run share a lock file.
    """
    strategy = settings.checkpoint.save_strategy
    if strategy is SaveStrategy.UNRESTRICTED:
        return None
    if settings.is_local:
        lock = RunDirectory(settings.directory).write_lock
        return FilePermits(lock, strategy, timeout=settings.checkpoint.save_timeout)
    if not isinstance(client, PermitClient):
        raise JoinError(f"{type(client).__name__} grants no permits, as {strategy.value} needs")
    # Not of the settings: a context is pickled to processes on other nodes.
    node = environ.get(env.NODE_NAME) or socket.gethostname()
    timeout = settings.checkpoint.save_timeout
    return MonitorPermits(client, scope_of(strategy, node), node=node, timeout=timeout)


def host(settings: RunSettings) -> Hosting:
    """Keep others from hosting this local run for as long as this process lives.

    Raises:
        ClaimRefusedError: another process hosts it, and lives.
    """
    try:
        return Hosting(RunDirectory(settings.directory))
    except LockTimeoutError as error:
        raise ClaimRefusedError(
            f"the run in {settings.store or settings.directory} is at work, and a second start is "
            f"refused: stop the other process first, or use another directory ({error})"
        ) from None


def next_local_attempt(settings: RunSettings) -> int:
    """One after the last attempt that was claimed in the run's directory, or in its store.

    Raises:
        MonitorError: the store cannot be read.
    """
    if settings.store is not None:
        from trainsync.monitor.client.store import next_attempt as next_in_store

        return next_in_store(open_run_store(settings.store), settings.uid)
    return next_attempt(RunDirectory(settings.directory), settings.uid)
