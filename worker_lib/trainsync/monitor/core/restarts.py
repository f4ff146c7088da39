"""Restarts in place of the attempt in force, as this monitor saw them."""

import logging
from datetime import datetime

from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.core.views import RestartView
from trainsync.monitor.ledger.saves import SaveOwner

_LOG = logging.getLogger(__name__)


class Restarts:
    """Tells of each restart, and keeps the last one for the status."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._last = RestartView()

    def note(self, successor: SaveOwner, when: datetime, reason: str) -> None:
        """The successor's predecessor was replaced ``when``, for a ``reason`` that people read."""
        attempt, number = successor.attempt, successor.restarts
        self._last = RestartView(number, when, reason)
        _LOG.warning("attempt %d is restarted in place, the %d. time: %s", attempt, number, reason)
        self._observer.restarted(attempt, number, reason)

    def view(self, number: int) -> RestartView:
        """The last restart, which is the ``number``-th; a monitor before this one may have seen
        when and why."""
        return self._last if self._last.count == number else RestartView(number)
