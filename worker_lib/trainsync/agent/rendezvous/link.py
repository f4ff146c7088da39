"""Reports to the run's monitor, again and again, and hears of versions. One thread."""

import logging
import threading
import time
from typing import Final

from trainsync.agent.intervals import DEFAULT_INTERVALS, AgentIntervals
from trainsync.agent.rendezvous.hints import Hints
from trainsync.agent.rendezvous.report import report_of
from trainsync.agent.settings import Rendezvous
from trainsync.agent.shared_state import SharedState
from trainsync.agent.state import AgentPhase, ReadinessLimits
from trainsync.failpoints import failpoint
from trainsync.monitor.client.servers import ServersClient
from trainsync.monitor.errors import ForbiddenError, MonitorError, NotServedError

_LOG = logging.getLogger(__name__)
_LEAST_SECONDS: Final = 0.1
_REFUSED_WAIT: Final = 60.0


class MonitorLink:
    """Link to one monitor, whose word is a hint.

    Args:
        agent: URL of this agent for clients; None: none is known.

    Attributes:
        error: why the monitor does not answer; None while it does.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        shared: SharedState,
        limits: ReadinessLimits,
        hints: Hints,
        stop: threading.Event,
        *,
        agent: str | None = None,
        intervals: AgentIntervals = DEFAULT_INTERVALS,
    ) -> None:
        self._intervals = intervals
        self._rendezvous = rendezvous
        self._agent = agent
        self._client = ServersClient(rendezvous.monitor, rendezvous.token_file)
        self._shared = shared
        self._limits = limits
        self._hints = hints
        self._stop = stop
        self._mark = ""
        self._failures = 0
        self.error: str | None = "it was not asked yet"

    def run(self) -> None:
        """Until ``stop`` is set; no error ends it."""
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._report(began)
            except MonitorError as error:
                self._failed(error)
            except Exception as error:  # noqa: BLE001 - no error ends the agent
                if not self._stop.is_set():
                    _LOG.exception("the report to the monitor failed unexpectedly")
                    self._failed(error)
            else:
                self._stop.wait(max(0.0, began + _LEAST_SECONDS - time.monotonic()))

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _report(self, now: float) -> None:
        state = self._shared.state
        report = report_of(
            state,
            self._limits,
            now,
            servers=self._rendezvous.servers,
            endpoint=self._rendezvous.endpoint,
            agent=self._agent,
            known=self._mark,
        )
        calm = report.ready and state.phase is AgentPhase.WAITING
        failpoint("agent.reporting")
        # A report that waits for news tells nothing new meanwhile.
        news = self._client.report(report, self._intervals.calm if calm else self._intervals.busy)
        failpoint("agent.reported")
        self._mark = news.mark
        self._hints.heard(news)
        if self.error is not None:
            _LOG.info("the monitor answers, and tells of new versions")
        self.error, self._failures = None, 0

    def _failed(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        self._hints.heard(None)
        self._mark = ""
        why = str(error) or type(error).__name__
        if self._failures == 0:
            _LOG.warning(
                "versions are looked for without the monitor, which does not answer: %s", why
            )
        self.error = why
        retry = self._intervals.retry * 2 ** min(self._failures, 10)
        wait = min(self._intervals.longest_retry, retry)
        # An older monitor knows no such request, or no such token.
        refused = isinstance(error, NotServedError | ForbiddenError)
        self._failures += 1
        self._stop.wait(_REFUSED_WAIT if refused else wait)
