"""Asks the monitor in the background whether the run is to save and give up its pods."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from trainsync.api.protocol import StopNotice, StopPoll
from trainsync.api.status import StopReason
from trainsync.monitor.client.base import StopClient
from trainsync.monitor.errors import ClientClosedError, FencedError, MonitorError, NotServedError

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 20.0  # the monitor answers as soon as there is a request
_POLL_SECONDS: Final = 0.5  # while a request is in force
_LATE_SECONDS: Final = 30.0  # the operator may free the pods so long after the deadline


@dataclass(frozen=True)
class Stop:
    """A request that is in force.

    Attributes:
        since: names it.
        deadline: of `time.monotonic`; the pods go then in any case.
    """

    since: datetime
    reason: StopReason
    deadline: float


class StopListener:
    """Hears of requests, and tells the monitor which step is saved for one, until `close`.

    A monitor that is away is asked again, and so is one of a release that knows no requests; one
    that is replaced is told the answer again. The thread ends when the attempt is over.

    Args:
        away: seconds before a monitor that is away is asked again.
        older: seconds before one that knows no requests is: the operator may make a newer one.
    """

    def __init__(
        self,
        monitor: StopClient,
        *,
        away: float = 2.0,
        older: float = 60.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monitor = monitor
        self._away_seconds = away
        self._older_seconds = older
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._closing = False
        self._stop: Stop | None = None
        self._answer: tuple[datetime, int] | None = None
        self._thread = threading.Thread(target=self._run, name="trainsync-stops", daemon=True)
        self._thread.start()

    @property
    def stop(self) -> Stop | None:
        """The request in force; None also once its time is over."""
        with self._changed:
            return self._in_force()

    @property
    def answered(self) -> int | None:
        """The step that is saved for the request in force."""
        with self._changed:
            stop = self._in_force()
            if stop is None or self._answer is None or self._answer[0] != stop.since:
                return None
            return self._answer[1]

    def answer(self, step: int) -> bool:
        """Say that ``step`` is saved for the request in force; whether it needed an answer."""
        with self._changed:
            stop = self._in_force()
            if stop is None:
                return False
            if self._answer is not None and self._answer[0] == stop.since:
                return self._answer[1] == step  # asked twice in a step, it is told the same
            self._answer = (stop.since, step)
            self._changed.notify_all()
        logger.warning(
            "the run gives up its pods (%s): step %d is saved, %.0f s are left",
            stop.reason,
            step,
            stop.deadline - self._monotonic(),
        )
        return True

    def wait(self, seconds: float) -> None:
        """Wait until the request becomes another, or for so many seconds."""
        with self._changed:
            before = self._stop
            self._changed.wait_for(lambda: self._closing or self._stop != before, seconds)

    def close(self, timeout: float) -> bool:
        """Ask no more. True: what is being asked is not waited for."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        return True

    def _in_force(self) -> Stop | None:
        stop = self._stop
        late = stop is not None and self._monotonic() > stop.deadline + _LATE_SECONDS
        return None if late else stop

    def _run(self) -> None:
        while not self._closing:
            with self._changed:
                known = None if self._stop is None else self._stop.since
                answer = self._answer if self._answer and self._answer[0] == known else None
            poll = StopPoll(since=known, step=None if answer is None else answer[1])
            try:
                notice = self._monitor.poll_stop(poll, _WAIT_SECONDS if known is None else 0.0)
            except (FencedError, ClientClosedError) as error:
                logger.debug("requests to save are not heard any more: %s", error)
                return
            except NotServedError as error:
                logger.debug("this monitor knows no requests to save: %s", error)
                self._pause(self._older_seconds)
                continue
            except MonitorError as error:
                logger.debug("the monitor is asked again for requests to save: %s", error)
                self._pause(self._away_seconds)
                continue
            self._heard(notice)
            if notice is not None:
                self._pause(_POLL_SECONDS)

    def _heard(self, notice: StopNotice | None) -> None:
        with self._changed:
            if notice is None:
                self._stop = None
            elif self._stop is None or self._stop.since != notice.since:
                deadline = self._monotonic() + notice.seconds_left
                self._stop = Stop(notice.since, notice.reason, deadline)
            else:
                return
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            before = self._answer
            self._changed.wait_for(lambda: self._closing or self._answer != before, seconds)
