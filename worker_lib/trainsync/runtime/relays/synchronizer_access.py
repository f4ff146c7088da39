"""Finds the Synchronizer of an attempt, or makes it in the process that claimed the attempt."""

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainsync.monitor.client.base import MonitorClient
from trainsync.runtime.errors import JoinError
from trainsync.runtime.settings import RunSettings
from trainsync.storage.saves.incarnations import generation

if TYPE_CHECKING:
    from trainsync.checkpoint.load.resume import Resume
    from trainsync.runtime.relays.synchronizer_host import SynchronizerHost
    from trainsync.runtime.stop.closing import Closing


class SynchronizerAccess:
    """One process's way to the Synchronizer. Imports Ray when it is first asked.

    Args:
        namespace: Ray namespace of the attempt's actors.
        claimed_here: whether this process claimed the attempt, and so makes the actor.
    """

    def __init__(self, namespace: str, *, claimed_here: bool) -> None:
        self._namespace = namespace
        self._claimed_here = claimed_here
        self._host: SynchronizerHost | None = None
        self._making = threading.Lock()  # guards the host

    def handle(
        self,
        settings: RunSettings,
        monitor: Callable[[], MonitorClient],
        resume: "Callable[[], Resume | None]",
    ) -> Any:
        """See `RunContext.synchronizer`.

        Args:
            settings: of the incarnation in force.
            monitor: opens this process's client of the monitor.
            resume: the checkpoint resumed from, before whose step there are no versions.
        """
        if settings.is_apart:
            from trainsync.runtime.methods import remote_synchronizer

            return remote_synchronizer(monitor())
        import ray

        from trainsync.runtime.relays.synchronizer_host import SynchronizerHost
        from trainsync.weights.synchronizer.actor import Synchronizer
        from trainsync.weights.synchronizer.handle import SynchronizerHandle

        if not ray.is_initialized():
            raise JoinError("the Synchronizer is a Ray actor: call ray.init() first")
        if not self._claimed_here:
            assert settings.incarnation is not None, "the attempt is claimed"
            return SynchronizerHandle(
                Synchronizer.get_actor(self._namespace),
                self._namespace,
                generation(settings.incarnation),
            )
        with self._making:
            if self._host is None:
                self._host = SynchronizerHost(settings, self._namespace, monitor(), resume())
            return self._host.handle

    def restart(
        self, settings: RunSettings, monitor: MonitorClient, resumed: "Resume | None"
    ) -> None:
        """See `SynchronizerHost.restart`; nothing where none was made."""
        with self._making:
            if self._host is not None:
                self._host.restart(settings, monitor, resumed)

    def endings(self) -> "Iterator[tuple[Closing, str]]":
        """See `SynchronizerHost.endings`; nothing where none was made."""
        if self._host is not None:
            yield from self._host.endings()
