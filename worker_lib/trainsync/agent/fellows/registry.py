"""Tells the monitor where this agent passes versions on, and hears of its fellows. One thread."""

import logging
import threading
from dataclasses import dataclass, field
from typing import Final

from trainsync.agent.settings import Rendezvous
from trainsync.api.protocol import Fellow, FellowReport
from trainsync.monitor.client.servers import ServersClient
from trainsync.monitor.errors import ForbiddenError, MonitorError, NotServedError

_LOG = logging.getLogger(__name__)
_EVERY_SECONDS: Final = 5.0
_REFUSED_WAIT: Final = 60.0


@dataclass(frozen=True)
class KnownFellows:
    """The monitor's last word.

    Attributes:
        me: the name of this agent.
        key: that agents of the run prove to one another; not shown.
    """

    me: str
    key: str = field(repr=False)
    fellows: tuple[Fellow, ...]


class FellowsLink:
    """Link to one monitor. While no answer comes, no fellow is known, and none is asked.

    Args:
        address: where this agent passes versions on; set before `run`.
    """

    def __init__(
        self, rendezvous: Rendezvous, stop: threading.Event, every: float = _EVERY_SECONDS
    ) -> None:
        self._client = ServersClient(rendezvous.monitor, rendezvous.token_file)
        self._stop = stop
        self._every = every
        self._known: KnownFellows | None = None
        self._failing = False
        self.address = ""

    def known(self) -> KnownFellows | None:
        """The fellows of now; None: the monitor does not tell."""
        return self._known

    def key(self) -> str | None:
        """The key that fellows have to prove."""
        known = self._known
        return None if known is None else known.key

    def run(self) -> None:
        """Until ``stop`` is set; no error ends it."""
        while not self._stop.is_set():
            wait = self._every
            try:
                answer = self._client.fellows(FellowReport(address=self.address))
                self._known = KnownFellows(answer.me, answer.key, tuple(answer.fellows))
                self._failing = False
            except Exception as error:  # noqa: BLE001 - no error ends the agent
                self._failed(error)
                # An older monitor knows no such request.
                if isinstance(error, NotServedError | ForbiddenError):
                    wait = _REFUSED_WAIT
            self._stop.wait(wait)

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _failed(self, error: Exception) -> None:
        self._known = None
        if self._stop.is_set() or self._failing:
            return
        self._failing = True
        details = None if isinstance(error, MonitorError) else error
        _LOG.warning("fellows are not known, and none is asked: %s", error, exc_info=details)
