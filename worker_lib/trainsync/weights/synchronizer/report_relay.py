"""Send the Synchronizer's reports to the monitor, from the process that made the actor.

The actor makes no calls itself: its event loop stays free, and it needs no token.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

import ray

from trainsync.api.protocol import WeightsReport
from trainsync.weights import threads
from trainsync.weights.relay import Relay

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 5.0  # the Synchronizer answers as soon as something changes
_CLOSE_CHECK_SECONDS: Final = 0.2
_RETRY_SECONDS: Final = 5.0


class WeightsRelay(Relay):
    """Asks the Synchronizer for its newest report and sends it, one at a time, until `close`.

    A report that cannot be sent is logged and counted, and the next one is tried. When the actor
    died, the one that replaces it is asked. See `Relay`.

    Args:
        synchronizer: gives the handle of the present actor.
        send: sends one report; bounded in time.

    Attributes:
        sent: how many reports were sent.
    """

    def __init__(
        self,
        synchronizer: Callable[[], Any],
        send: Callable[[WeightsReport], None],
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        self._synchronizer = synchronizer
        self._send = send
        self._seen = 0
        self.sent = 0
        undone = "weights are not reported to the monitor"
        super().__init__("trainsync-weights", undone, retry_seconds)

    def close(self, timeout: float) -> bool:
        """Send what is new, then end. False if ``timeout`` seconds were not enough."""
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _pass_on(self, seconds: float = _POLL_SECONDS) -> None:
        try:
            answer = self._ask(self._seen, seconds)
        except ray.exceptions.RayActorError as error:
            self.last_error = error
            self._seen = 0  # a new actor counts from 0
            self._closing.wait(_CLOSE_CHECK_SECONDS)
            return
        if answer is None:
            return
        self._seen, report = answer
        try:
            self._send(report)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._note(error, f"a report of version {report.trainer_version} was not sent")
        else:
            self.sent += 1

    def _end(self) -> None:
        try:
            self._pass_on(0.0)
        except Exception as error:  # noqa: BLE001 - no report follows that could be late
            self.last_error = error

    def _ask(self, seen: int, seconds: float) -> tuple[int, WeightsReport] | None:
        """One question; given up when `close` is called meanwhile."""
        reference = self._synchronizer().next_report.remote(seen, seconds)
        answer: tuple[int, WeightsReport] | None = threads.answer(
            reference, lambda: self._closing.is_set() and seconds > 0
        )
        return answer
