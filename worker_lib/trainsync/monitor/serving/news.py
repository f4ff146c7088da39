"""Which version inference servers are told of, and how their requests wait for another."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from trainsync.api.protocol import CommitNotice, SaveKind, ServerNews
from trainsync.monitor.commit.newest import CommitNews, newer
from trainsync.monitor.errors import MonitorError
from trainsync.monitor.server.change_signal import ChangeSignal
from trainsync.monitor.serving.roster import ServerRoster

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.STATE_DICT
_ASK_SECONDS: Final = 2.0  # commits are told of at once, attempts and what they resumed from later


class VersionNews:
    """The newest committed version of the run's present training. For one event loop.

    Args:
        commits: which knows a commit before the core answers again.
        changed: wakes waiting requests; also to be notified of commits.
    """

    def __init__(self, commits: CommitNews, roster: ServerRoster, changed: ChangeSignal) -> None:
        self._commits = commits
        self._roster = roster
        self._changed = changed
        self._seen: tuple[int | None, CommitNotice | None] | None = None

    async def follow(
        self,
        ask: Callable[[], Awaitable[tuple[int | None, CommitNotice | None]]],
        lease_held: Callable[[], bool],
    ) -> None:
        """Ask now and then while servers report; until cancelled.

        Args:
            ask: the core for `MonitorCore.newest_of_run`.
        """
        known = True
        while True:
            if lease_held() and not self._roster.empty:
                try:
                    found = await ask()
                except MonitorError as error:  # servers look at the volume themselves
                    if known:
                        _LOG.warning("servers are not told of versions for now: %s", error)
                    known = False
                else:
                    self.saw(*found)
                    known = True
            await asyncio.sleep(_ASK_SECONDS)

    def saw(self, attempt: int | None, newest: CommitNotice | None) -> None:
        """The core told the attempt in force and its newest: `MonitorCore.newest_of_run`."""
        before, self._seen = self._seen, (attempt, newest)
        self._roster.tell_newest(-1 if newest is None else newest.step)
        if self._seen != before:
            self._changed.notify_threadsafe()

    def now(self) -> ServerNews:
        """The news for servers now; the mark is empty before the core was asked."""
        if self._seen is None:
            return ServerNews(mark="")
        attempt, newest = self._seen
        if attempt is not None:
            after = (-1, -1) if newest is None else (newest.attempt, newest.step)
            newest = newer(self._commits.newer(_KIND, attempt, after), after) or newest
        said = "" if newest is None else f"{newest.attempt}.{newest.step}.{newest.manifest_digest}"
        return ServerNews(mark=f"{attempt}/{said}", newest=newest)

    async def after(self, mark: str, seconds: float) -> ServerNews:
        """`now`, as soon as its mark is another one, or after ``seconds``."""

        async def look() -> ServerNews:
            return self.now()

        return await self._changed.until(look, lambda found: found.mark != mark, seconds)
