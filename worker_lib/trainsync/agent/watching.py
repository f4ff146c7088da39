"""Two watches, each in a thread of its own: on the newest version, and on the server."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from trainsync.agent.feeds.base import FeedError, VersionFeed
from trainsync.agent.intervals import DEFAULT_INTERVALS, AgentIntervals
from trainsync.agent.rendezvous.hints import Hints
from trainsync.agent.shared_state import SharedState
from trainsync.agent.state import LONGEST_WAIT_SECONDS, AgentPhase, AgentState, ReportedWeights
from trainsync.engines.servers.base import ServerDriver
from trainsync.engines.servers.errors import ServerError

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS: Final = 30.0


class FeedWatch:
    """Keeps the state's newest version up to date.

    Args:
        hints: when to look; None: every second.
    """

    def __init__(
        self,
        feed: VersionFeed,
        shared: SharedState,
        stop: threading.Event,
        hints: Hints | None = None,
        intervals: AgentIntervals = DEFAULT_INTERVALS,
    ) -> None:
        self._feed = feed
        self._intervals = intervals
        self._shared = shared
        self._stop = stop
        self._hints = hints
        self._failures = 0

    def run(self) -> None:
        """Until ``stop`` is set."""
        while not self._stop.is_set():
            try:
                self._look()
                self._failures = 0
            except FeedError as error:
                self._failed(str(error))
            except Exception as error:  # noqa: BLE001 - no error ends the agent
                _LOG.exception("the feed failed unexpectedly")
                self._failed(f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        state = self._shared.state
        seldom = False
        if self._hints is not None and not state.missing and state.feed_error is None:
            self._hints.pause(state.newest)
            seldom = self._hints.agree(state.newest)
        after = None if state.missing else state.newest
        found = self._feed.next(after, 0.0 if seldom else self._intervals.feed)
        now = time.monotonic()
        if found is None:
            self._changed(lambda state: state.looked(now))
            return
        self._changed(lambda state: state.found(found, now))
        if state.missing:
            self._stop.wait(self._intervals.retry)  # the feed may tell of the same version again
        if state.newest != found:
            _LOG.info("version %s of attempt %d is the newest", found.tag, found.attempt)

    def _failed(self, why: str) -> None:
        self._changed(lambda state: state.feed_failed(why))
        wait = min(LONGEST_WAIT_SECONDS / 2, self._intervals.retry * 2 ** min(self._failures, 10))
        self._failures += 1
        self._stop.wait(wait)

    def _changed(self, step: Callable[[AgentState], AgentState]) -> None:
        before, after = self._shared.change(step)
        if after.feed_error is not None and after.feed_error != before.feed_error:
            _LOG.warning("the newest version is not known for now: %s", after.feed_error)
        elif before.feed_error is not None and after.feed_error is None:
            _LOG.info("the newest version is known again")


class ServerWatch:
    """Keeps the state's knowledge of the server up to date.

    Args:
        driver: with a short deadline for each call.
    """

    def __init__(
        self,
        driver: ServerDriver,
        shared: SharedState,
        stop: threading.Event,
        intervals: AgentIntervals = DEFAULT_INTERVALS,
    ) -> None:
        self._driver = driver
        self._intervals = intervals
        self._shared = shared
        self._stop = stop
        self._using = threading.Lock()

    def run(self) -> None:
        """Until ``stop`` is set."""
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self._intervals.look)

    def look(self) -> bool:
        """Ask the server, unless an update goes on; whether the server was asked."""
        if self._shared.state.phase is AgentPhase.UPDATING:
            return False
        if not self._using.acquire(timeout=_WAIT_SECONDS):
            return False
        try:
            self._ask()
        finally:
            self._using.release()
        return True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Look, then hold other looks back in the block: their answers would be late."""
        with self._using:
            self._ask()
            yield

    def _ask(self) -> None:
        try:
            served = ReportedWeights(self._driver.tag(), self._driver.is_paused())
        except Exception as error:  # noqa: BLE001 - no error ends the agent
            if not isinstance(error, ServerError):
                _LOG.exception("the server could not be asked")
            why = str(error) or type(error).__name__
            before, _ = self._shared.change(lambda state: state.server_failed(why))
            if before.server is not None:
                _LOG.warning("the server does not answer: %s", why)
        else:
            before, _ = self._shared.change(lambda state: state.saw(served))
            if before.server is None:
                _LOG.info("the server answers, and has weights %r", served.tag)
