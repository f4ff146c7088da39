"""Which version inference servers are told of, and how their requests wait for another."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from trainsync.api.protocol import CommitNotice, SaveKind, ServerNews
from trainsync.api.spec import SyncMethod
from trainsync.monitor.access.served_core import ServedCore
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.commit.newest import CommitNews, newer
from trainsync.monitor.errors import MonitorError
from trainsync.monitor.serving.roster import ServerRoster

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.STATE_DICT
_ASK_SECONDS: Final = 2.0  # commits are told of at once, attempts and what they resumed from later


@dataclass(frozen=True)
class NewestVersion:
    """The newest version for servers, as a core knows it.

    Attributes:
        attempt: in force; None: there is none, or versions are not committed.
        commit: the newest version, where versions are committed.
        step: of the newest version; -1: there is none; None: that is not known yet.
    """

    attempt: int | None
    commit: CommitNotice | None
    step: int | None


def newest_version(core: ServedCore, method: SyncMethod) -> NewestVersion:
    """The newest version for servers, by the run's method. What a store has, agents read there.

    Raises:
        MonitorError: it cannot be told now.
    """
    if method is SyncMethod.STORE:
        return NewestVersion(None, None, core.newest_published())
    attempt, commit = core.newest_of_run(_KIND)
    return NewestVersion(attempt, commit, -1 if commit is None else commit.step)


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
        ask: Callable[[], Awaitable[NewestVersion]],
        lease_held: Callable[[], bool],
    ) -> None:
        """Ask now and then while servers report; until cancelled.

        Args:
            ask: the core for `newest_version`.
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
                    self.saw(found)
                    known = True
            await asyncio.sleep(_ASK_SECONDS)

    def saw(self, found: NewestVersion) -> None:
        """The core told of the newest version."""
        before, self._seen = self._seen, (found.attempt, found.commit)
        if found.step is not None:
            self._roster.tell_newest(found.step)
        else:
            self._roster.tell_none_yet()
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
