"""Posts the monitor's Events: at a bounded rate, again while the API server is away."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from trainsync.api import events as api_events
from trainsync.api import names
from trainsync.kube.client import KubeError
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.kube.client import KubeApi
from trainsync.monitor.server.events import EventQueue, MonitorEvent

_LOG = logging.getLogger(__name__)

BURST: Final = 20
SECONDS_FOR_EACH: Final = 10.0
"""After a burst, at most one Event in so many seconds."""
_LOOK_SECONDS: Final = 30.0
_SHORTEST_WAIT: Final = 1.0
_LONGEST_WAIT: Final = 60.0
_LONGEST_TRYING: Final = 3600.0
_LATER: Final = (None, 429)
"""Not reached, or too many requests: it may work later, as with 500 and above."""


class Allowance:
    """At most ``burst`` at once, and one in ``seconds`` after that."""

    def __init__(self, burst: int, seconds: float, monotonic: Callable[[], float]) -> None:
        self._spare = burst * seconds
        self._seconds = seconds
        self._monotonic = monotonic
        self._paid_until = monotonic() - self._spare

    def take(self) -> float:
        """Take one; how many seconds it has to wait."""
        now = self._monotonic()
        self._paid_until = max(self._paid_until, now - self._spare) + self._seconds
        return max(self._paid_until - now, 0.0)


class EventPoster:
    """Best effort: what the API server refuses is counted, and logged once until it works again.

    Args:
        count: told ``posted`` or ``failed`` for each try.
        sleep: how to wait.
    """

    def __init__(
        self,
        api: KubeApi,
        queue: EventQueue,
        *,
        namespace: str,
        run: str,
        uid: str,
        count: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._queue = queue
        self._namespace = namespace
        self._run = run
        self._uid = uid
        self._count = count
        self._sleep = sleep
        self._allowance = Allowance(BURST, SECONDS_FOR_EACH, monotonic)
        self._failing = False

    async def run(self, added: ChangeSignal) -> None:
        """Post until cancelled; ``added`` tells of new Events."""
        while True:
            wake = added.event()
            event = self._queue.take()
            if event is None:
                await ChangeSignal.wait(wake, _LOOK_SECONDS)
                continue
            await self._sleep(self._allowance.take())
            await self._post(event)

    async def _post(self, event: MonitorEvent) -> None:
        document = api_events.build(
            namespace=self._namespace,
            run=self._run,
            uid=self._uid,
            reason=event.reason.value,
            message=event.message,
            warning=event.warning,
            component=names.MONITOR_FIELD_MANAGER,
            now=event.time,
            count=event.count,
        )
        wait, waited, tried = _SHORTEST_WAIT, 0.0, False
        while True:
            try:
                await self._api.create_event(document)
            except KubeError as error:
                if tried and error.status == 409:
                    self._count("posted")  # an earlier try came through, its answer did not
                    return
                tried = True
                self._count("failed")
                if not self._failing:
                    _LOG.warning("Event %s is not posted: %s", event.reason, error)
                self._failing = True
                if error.status not in _LATER and error.status < 500:
                    return
                if waited > _LONGEST_TRYING:
                    return  # an Event is kept for an hour: this one would be gone already
                await self._sleep(wait)
                waited += wait
                wait = min(wait * 2, _LONGEST_WAIT)
                continue
            if self._failing:
                _LOG.info("Events are posted again")
            self._failing = False
            self._count("posted")
            return
