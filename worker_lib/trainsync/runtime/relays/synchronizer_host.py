"""The Synchronizer of an attempt, in the process that claimed the attempt. Imports Ray."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from trainsync.checkpoint.load.resume import Resume
from trainsync.monitor.client.base import MonitorClient
from trainsync.runtime.methods import open_call_relay, open_relays
from trainsync.runtime.relays.monitor_relays import WeightsRelay
from trainsync.runtime.settings import RunSettings
from trainsync.runtime.stop.closing import Closing
from trainsync.storage.saves.incarnations import generation
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.synchronizer.connection import SynchronizerConnection
from trainsync.weights.synchronizer.failover import SynchronizerFailover
from trainsync.weights.synchronizer.handle import SynchronizerHandle

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 5.0  # for all relays


class SynchronizerHost:
    """Makes the actor, makes it again when it dies, and relays between it and the monitor."""

    def __init__(
        self, settings: RunSettings, namespace: str, monitor: MonitorClient, resumed: Resume | None
    ) -> None:
        floor = -1 if resumed is None else resumed.step - 1
        self._namespace = namespace
        self._failover = SynchronizerFailover(namespace, floor)
        self._begin(settings, monitor, resumed)

    def _begin(self, settings: RunSettings, monitor: MonitorClient, resumed: Resume | None) -> None:
        """Serve the trainers of this incarnation, which resume from there."""
        assert settings.incarnation is not None, "the attempt is claimed"
        self._restarts = generation(settings.incarnation)
        if self._restarts:
            self._rewind(0 if resumed is None else resumed.step)
        # Of this incarnation, in a thread that is late, too.
        handle = partial(self._handle_of, self._restarts)
        self._saves = open_relays(settings, monitor, handle)
        self._calls = open_call_relay(settings, monitor, handle)
        self._reports = WeightsRelay(handle, monitor.report_weights)

    def restart(
        self, settings: RunSettings, monitor: MonitorClient, resumed: Resume | None
    ) -> None:
        """The trainers were restarted in place, under the incarnation of ``settings``.

        Explorers stay; what they took of steps after that resumed from is no more.

        Raises:
            WeightsUnavailableError: the Synchronizer does not answer.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        for relay, late in self._relays():
            if not relay.close(max(0.0, deadline - time.monotonic())):
                # The monitor refuses its client, and the Synchronizer what it would announce.
                logger.warning("the restart in place goes on, though %s", late)
        self._begin(settings, monitor, resumed)

    def _rewind(self, step: int) -> None:
        """Tell the Synchronizer of the restart, until one that is built again would know, too.

        Raises:
            WeightsUnavailableError: it does not answer, or no longer in time.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        connection = SynchronizerConnection(self.handle, _ANSWER_SECONDS)
        while not connection.call("rewind", self._restarts, step, timeout=_ANSWER_SECONDS):
            if self._failover.error is not None:  # it is not built again any more
                return
            if time.monotonic() >= deadline:
                raise WeightsUnavailableError(
                    f"restart {self._restarts} in place: what the Synchronizer knows was not "
                    f"taken over within {_ANSWER_SECONDS:g} s"
                )

    @property
    def handle(self) -> SynchronizerHandle:
        """Handle of the present actor, for the trainers of the present incarnation."""
        return self._handle_of(self._restarts)

    def _handle_of(self, restarts: int) -> SynchronizerHandle:
        return SynchronizerHandle(self._failover.handle, self._namespace, restarts)

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
