"""`CheckpointMonitor`: the reference's name for the monitor of a local run."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.claims import LOCAL_UID, next_attempt

_CLUSTER: Final = "local"
_NOW: Final = {
    "register_thread_count": "CheckpointCoordinator.register(step, checkpoint_participants=...)",
    "monitor_step": "CheckpointCoordinator.register_and_monitor(step)",
    "notify_started": "CheckpointCoordinator.save_async, which tells the monitor by itself",
    "notify_finished": "CheckpointCoordinator.save_async, which tells the monitor by itself",
}
"""Calls of the reference's actor → what does it here."""


class CheckpointMonitor(LocalMonitorClient):
    """The monitor of a local run, in the process that makes it; it claims the next attempt.

        monitor = trainsync.CheckpointMonitor("my-run")
        coordinator = trainsync.CheckpointCoordinator(monitor)

    It is no Ray actor, and another one than `RunContext` has: with a context, use
    ``ctx.monitor`` and ``ctx.coordinator()``, which on Kubernetes speak with the run's monitor.
    Sent to another process, a Ray actor say, it becomes that process's way to the same monitor:
    ``CheckpointCoordinator(monitor, rank=rank, world_size=world_size)``.

    Args:
        directory: the run's directory, which every process sees; it is made if there is none.
        max_to_keep: checkpoints that are kept; None keeps all.

    Raises:
        ClaimRefusedError: another process claims attempts there.
    """

    def __init__(self, directory: str | Path, *, max_to_keep: int | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        super().__init__(
            self.directory,
            attempt=next_attempt(RunDirectory(self.directory), LOCAL_UID),
            incarnation=secrets.token_hex(8),
            settings=CoreSettings(max_to_keep=max_to_keep),
        )
        try:
            self.claim(_CLUSTER)
        except BaseException:
            self.close()
            raise

    @classmethod
    def get_actor(cls, namespace: str = "") -> NoReturn:
        """Refused: there is no actor to be found by a namespace. Raises `TypeError`."""
        raise TypeError(
            f"CheckpointMonitor.get_actor(namespace={namespace!r}): the monitor is no Ray actor; "
            "expected RunContext.from_env().coordinator(), or CheckpointMonitor(directory) made "
            "in one process and sent to the others"
        )

    def __getattr__(self, name: str) -> Any:
        now = _NOW.get(name)
        instead = "" if now is None else f"; expected {now}"
        raise AttributeError(f"CheckpointMonitor has no {name}{instead}")

    def __reduce__(self) -> tuple[Callable[..., "JoinedMonitor"], tuple[str, int, str]]:
        return JoinedMonitor, (str(self.directory), self.attempt, self.incarnation)


class JoinedMonitor(DiskMonitorClient):
    """Stands for a `CheckpointMonitor` in a process that it was sent to."""

    def __init__(self, directory: str, attempt: int, incarnation: str) -> None:
        self.directory = Path(directory)
        super().__init__(self.directory, attempt=attempt, incarnation=incarnation)

    def __reduce__(self) -> tuple[type["JoinedMonitor"], tuple[str, int, str]]:
        return type(self), (str(self.directory), self.attempt, self.incarnation)
