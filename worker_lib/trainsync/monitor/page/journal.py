"""What a monitor has seen happen since it began: commits, faults, recoveries. Bounded."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Final

from trainsync.api.page import News, NewsKind, SavePoint
from trainsync.api.protocol import SaveKind
from trainsync.api.status import ExplorerStatus
from trainsync.monitor.observer import NullObserver
from trainsync.monitor.saves import CommittedInfo
from trainsync.monitor.views import CoreView

_SAVES_KEPT: Final = 2000
_NEWS_KEPT: Final = 100
_NAMED: Final = 4
_LOST: Final = "lost"


class Journal(NullObserver):
    """Told of commits by the core's thread, and shown views of the core by the event loop."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.since = clock()
        self._clock = clock
        self._lock = threading.Lock()
        self._saves: deque[SavePoint] = deque(maxlen=_SAVES_KEPT)
        self._news: deque[News] = deque(maxlen=_NEWS_KEPT)
        self._attempt: int | None = None
        self._error: str | None = None
        self._explorers: Mapping[str, ExplorerStatus] = {}

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""
        with self._lock:
            self._saves.append(save_point(kind, info))

    def saves(self) -> list[SavePoint]:
        """Commits, in the order they were made."""
        with self._lock:
            return list(self._saves)

    def news(self) -> list[News]:
        """What else happened, oldest first."""
        return list(self._news)

    def see(self, view: CoreView) -> None:
        """Keep what differs from the view before. For one thread."""
        self._see_attempt(view.attempt)
        self._see_error(view.checkpoint.last_error)
        now = {e.id: e for e in view.weights.explorers} if view.weights is not None else {}
        before, self._explorers = self._explorers, now
        lost = [e for e in now.values() if _is_new(e, before, _lost)]
        back = [e for e in now.values() if not _lost(e) and _lost(before.get(e.id))]
        refused = [e for e in now.values() if not _lost(e) and _is_new(e, before, _refuses)]
        self._tell_of(lost, NewsKind.FAULT, "is lost", "are lost")
        self._tell_of(refused, NewsKind.FAULT, "refused a version", "refused a version")
        self._tell_of(back, NewsKind.RECOVERY, "is back", "are back")

    def _see_attempt(self, attempt: int | None) -> None:
        before, self._attempt = self._attempt, attempt
        if before is not None and attempt is not None and attempt != before:
            self._tell(NewsKind.PLAIN, f"Attempt {attempt} began; attempt {before} is over.")

    def _see_error(self, error: str | None) -> None:
        before, self._error = self._error, error
        if error is not None and error != before:
            self._tell(NewsKind.FAULT, error)
        elif error is None and before is not None:
            self._tell(NewsKind.RECOVERY, "Saves are committed again.")

    def _tell_of(self, who: list[ExplorerStatus], kind: NewsKind, one: str, many: str) -> None:
        if len(who) == 1:
            why = f": {who[0].message}" if who[0].message and kind is NewsKind.FAULT else ""
            self._tell(kind, f"Explorer {who[0].id} {one}{why}.")
        elif who:
            named = _some(e.id for e in who)
            self._tell(kind, f"{len(who)} explorers {many}: {named}.")

    def _tell(self, kind: NewsKind, text: str) -> None:
        count = 1
        if self._news and (self._news[-1].kind, self._news[-1].text) == (kind, text):
            count = self._news.pop().count + 1
        self._news.append(News(time=self._clock(), kind=kind, text=text, count=count))


def save_point(kind: SaveKind, info: CommittedInfo) -> SavePoint:
    """A manifest as the page shows it."""
    return SavePoint(
        kind=kind,
        step=info.step,
        attempt=info.owner.attempt,
        bytes=info.bytes,
        time=info.time,
    )


def _lost(explorer: ExplorerStatus | None) -> bool:
    return explorer is not None and explorer.state == _LOST


def _refuses(explorer: ExplorerStatus | None) -> bool:
    return explorer is not None and explorer.state != _LOST and explorer.message is not None


def _is_new(
    explorer: ExplorerStatus,
    before: Mapping[str, ExplorerStatus],
    holds: Callable[[ExplorerStatus | None], bool],
) -> bool:
    return holds(explorer) and not holds(before.get(explorer.id))


def _some(ids: Iterable[str]) -> str:
    named = list(ids)
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more
