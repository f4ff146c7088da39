"""The Synchronizer of an attempt, in the process that claimed the attempt. Imports Ray."""

import logging
import time
from collections.abc import Iterator
from typing import Any, Final

from trainsync.checkpoint.load.resume import Resume
from trainsync.monitor.client.base import MonitorClient
from trainsync.runtime.closing import Closing
from trainsync.runtime.methods import open_call_relay, open_relays
from trainsync.runtime.relays.monitor_relays import WeightsRelay
from trainsync.runtime.settings import RunSettings
from trainsync.weights.synchronizer.connection import SynchronizerConnection
from trainsync.weights.synchronizer.failover import SynchronizerFailover

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 5.0  # for all relays


class SynchronizerHost:
    """Makes the actor, makes it again when it dies, and relays between it and the monitor."""

    def __init__(
        self, settings: RunSettings, namespace: str, monitor: MonitorClient, resumed: Resume | None
    ) -> None:
        floor = -1 if resumed is None else resumed.step - 1
        self._failover = SynchronizerFailover(namespace, floor)
        self._open_relays(settings, monitor)

    def _open_relays(self, settings: RunSettings, monitor: MonitorClient) -> None:
        self._saves = open_relays(settings, monitor, lambda: self.handle)
        self._calls = open_call_relay(settings, monitor, lambda: self.handle)
        self._reports = WeightsRelay(lambda: self.handle, monitor.report_weights)

    def restart(
        self, settings: RunSettings, monitor: MonitorClient, step: int, number: int
    ) -> None:
        """The trainers were restarted, for the ``number``-th time, and resume from ``step``.

        Explorers stay; what they took of later steps is no more.

        Raises:
            WeightsUnavailableError: the Synchronizer does not answer.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        for relay, late in self._relays():
            if not relay.close(max(0.0, deadline - time.monotonic())):
                # The monitor refuses its client, and the Synchronizer what it would announce.
                logger.warning("restart %d in place goes on, though %s", number, late)
        connection = SynchronizerConnection(self.handle, _ANSWER_SECONDS)
        connection.call("rewind", number, step, timeout=_ANSWER_SECONDS)
        self._open_relays(settings, monitor)

    @property
    def handle(self) -> Any:
        """Handle of the present actor."""
        return self._failover.handle

    def endings(self) -> Iterator[tuple[Closing, str]]:
        """The objects to close, in order, each with the words for one that takes too long."""
        yield from self._relays()
        yield self._failover, "its Synchronizer is still being rebuilt"

    def _relays(self) -> Iterator[tuple[Closing, str]]:
        if self._saves is not None:
            commits, aborts = self._saves
            yield commits, "a commit is still being announced"
            yield aborts, "an abort is still being told"
        if self._calls is not None:
            yield self._calls, "calls of explorers in another cluster are still being answered"
        yield self._reports, "the weights were not reported"
