"""Send reports from a background thread: the newest one wins, nothing blocks training."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

ReportT = TypeVar("ReportT")

AGAIN_SECONDS: Final = 2.0
"""Before a report that was not sent is tried again."""
TRIES: Final = 300
"""Tries of one report: for ten minutes at least, as the newest may be the last for long."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SenderStats:
    """Counts how the reports fared so far."""

    sent: int = 0
    superseded: int = 0  # a newer one came before it could be sent
    failed: int = 0
    last_error: Exception | None = None


class LatestWinsSender(Generic[ReportT]):
    """At most one report waits; `submit` returns at once.

    Args:
        name: of the thread, and in log lines.
        send: sends one report; bounded in time. What it raises is logged and counted, and the
            next report is sent.
        passing: errors after which the same report is tried again, unless there is a newer one.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[ReportT], None],
        passing: tuple[type[Exception], ...] = (),
    ) -> None:
        self._name = name
        self._send = send
        self._passing = passing
        self._changed = threading.Condition()
        self._waiting: ReportT | None = None
        self._closing = False
        self._stats = SenderStats()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def stats(self) -> SenderStats:
        """A consistent copy of the counters."""
        with self._changed:
            return self._stats

    def submit(self, report: ReportT) -> None:
        """Send ``report`` soon, instead of one that still waits. Ignored after `close`."""
        with self._changed:
            if self._closing:
                return
            if self._waiting is not None:
                self._stats = replace(self._stats, superseded=self._stats.superseded + 1)
            self._waiting = report
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Send what waits, then end the thread; False if ``timeout`` seconds were not enough."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        tries = 0  # of the report that waits
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                report, self._waiting = self._waiting, None
            if report is None:
                return
            started = time.monotonic()
            try:
                self._send(report)
            except Exception as error:  # noqa: BLE001 - training goes on
                tries += 1
                seconds = time.monotonic() - started
                logger.warning(
                    "%s: a report was not sent after %.1f s: %s", self._name, seconds, error
                )
                if not self._again(report, error, tries):
                    tries = 0
            else:
                tries = 0
                with self._changed:
                    self._stats = replace(self._stats, sent=self._stats.sent + 1)

    def _again(self, report: ReportT, error: Exception, tries: int) -> bool:
        """Count the failure, and let ``report`` wait again after a while if that may help."""
        with self._changed:
            self._stats = replace(self._stats, failed=self._stats.failed + 1, last_error=error)
            if self._closing or tries >= TRIES or not isinstance(error, self._passing):
                return False
            # What closes waits for one more try.
            self._changed.wait_for(
                lambda: self._waiting is not None or self._closing, AGAIN_SECONDS
            )
            if self._waiting is not None:
                self._stats = replace(self._stats, superseded=self._stats.superseded + 1)
                return False
            self._waiting = report
            return True
