"""Tell the monitor what the Synchronizer knows, from a thread of the process that made the actor.

The actor itself makes no calls: its loop stays free, and it needs no token.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from trainsync.api.protocol import WeightsReport
from trainsync.weights import threads
from trainsync.weights.synchronizer.ray_errors import one_sentence

logger = logging.getLogger(__name__)

_POLL_SECONDS = 5.0  # of one question, which is answered as soon as something changes
_CLOSE_CHECK_SECONDS = 0.2
_RETRY_SECONDS = 5.0  # after an answer that was an error


class WeightsRelay:
    """Asks the Synchronizer for its newest report and sends it, one at a time, until `close`.

    A report that cannot be sent is logged and counted; the next one is tried again. When the actor
    died, the one that replaces it is asked; one that cannot say what it knows is asked again. When
    Ray is gone the thread ends, and says so.

    Args:
        synchronizer: the actor handle of now.
        send: sends one report; bounded in time.
    """

    def __init__(
        self, synchronizer: Callable[[], Any], send: Callable[[WeightsReport], None]
    ) -> None:
        self._synchronizer = synchronizer
        self._send = send
        self._closing = threading.Event()
        self.sent = 0
        self.failed = 0
        self.last_error: Exception | None = None
        self._thread = threads.start("trainsync-weights", self._run, self._closing)

    def close(self, timeout: float) -> bool:
        """Send what is new, then end. False if ``timeout`` seconds were not enough."""
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        seen = 0
        last_look = False
        while not last_look and threads.ray_is_there():
            last_look = self._closing.is_set()
            try:
                answer = self._ask(seen, 0.0 if last_look else _POLL_SECONDS)
            except ray.exceptions.RayActorError as error:
                self.last_error = error
                seen = 0  # a new actor counts from 0
                self._closing.wait(_CLOSE_CHECK_SECONDS)
                continue
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self.last_error = error
                if not self._closing.is_set():
                    logger.warning(
                        "weights are not reported to the monitor: %s", one_sentence(error)
                    )
                self._closing.wait(_RETRY_SECONDS)
                continue
            if answer is None:
                continue
            seen, report = answer
            try:
                self._send(report)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self.failed += 1
                self.last_error = error
                logger.warning(
                    "a report of version %d was not sent: %s", report.trainer_version, error
                )
            else:
                self.sent += 1

    def _ask(self, seen: int, seconds: float) -> tuple[int, WeightsReport] | None:
        """One question; given up when `close` is called meanwhile."""
        reference = self._synchronizer().next_report.remote(seen, seconds)
        answer: tuple[int, WeightsReport] | None = threads.answer(
            reference, lambda: self._closing.is_set() and seconds > 0
        )
        return answer
