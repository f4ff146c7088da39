"""Which version inference servers are told of."""

from collections.abc import Callable

from trainsync.api.protocol import CommitNotice, SaveKind, ServerNews
from trainsync.monitor.commit.newest import CommitNews, newer
from trainsync.monitor.serving.roster import ServerRoster

_KIND = SaveKind.STATE_DICT


class VersionNews:
    """The newest committed version of the run's present training. For one event loop.

    Args:
        commits: which knows a commit before the core answers again.
        changed: told that waiting requests are to look.
    """

    def __init__(
        self, commits: CommitNews, roster: ServerRoster, changed: Callable[[], None]
    ) -> None:
        self._commits = commits
        self._roster = roster
        self._changed = changed
        self._seen: tuple[int | None, CommitNotice | None] | None = None

    def saw(self, attempt: int | None, newest: CommitNotice | None) -> None:
        """The core told the attempt in force and `MonitorCore.newest_of_run`."""
        before, self._seen = self._seen, (attempt, newest)
        self._roster.tell_newest(-1 if newest is None else newest.step)
        if self._seen != before:
            self._changed()

    def now(self) -> ServerNews:
        """What servers are told now; the mark is empty before the core was asked."""
        if self._seen is None:
            return ServerNews(mark="")
        attempt, newest = self._seen
        if attempt is not None:
            after = (-1, -1) if newest is None else (newest.attempt, newest.step)
            newest = newer(self._commits.newer(_KIND, attempt, after), after) or newest
        said = "" if newest is None else f"{newest.attempt}.{newest.step}.{newest.manifest_digest}"
        return ServerNews(mark=f"{attempt}/{said}", newest=newest)
