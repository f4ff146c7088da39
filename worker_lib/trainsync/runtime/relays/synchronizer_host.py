"""The Synchronizer of an attempt, in the process that claimed the attempt. Imports Ray."""

from collections.abc import Iterator
from typing import Any

from trainsync.checkpoint.load.resume import Resume
from trainsync.monitor.client.base import MonitorClient
from trainsync.runtime.closing import Closing
from trainsync.runtime.methods import open_call_relay, open_relays
from trainsync.runtime.relays.monitor_relays import WeightsRelay
from trainsync.runtime.settings import RunSettings
from trainsync.weights.synchronizer.failover import SynchronizerFailover


class SynchronizerHost:
    """Makes the actor, makes it again when it dies, and relays between it and the monitor."""

    def __init__(
        self, settings: RunSettings, namespace: str, monitor: MonitorClient, resumed: Resume | None
    ) -> None:
        floor = -1 if resumed is None else resumed.step - 1
        self._failover = SynchronizerFailover(namespace, floor)
        self._saves = open_relays(settings, monitor, lambda: self.handle)
        self._calls = open_call_relay(settings, monitor, lambda: self.handle)
        self._reports = WeightsRelay(lambda: self.handle, monitor.report_weights)

    @property
    def handle(self) -> Any:
        """Handle of the present actor."""
        return self._failover.handle

    def endings(self) -> Iterator[tuple[Closing, str]]:
        """The objects to close, in order, each with the words for one that takes too long."""
        if self._saves is not None:
            commits, aborts = self._saves
            yield commits, "a commit is still being announced"
            yield aborts, "an abort is still being told"
        if self._calls is not None:
            yield self._calls, "calls of explorers in another cluster are still being answered"
        yield self._reports, "the weights were not reported"
        yield self._failover, "its Synchronizer is still being rebuilt"
