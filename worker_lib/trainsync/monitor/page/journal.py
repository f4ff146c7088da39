"""Keeps the commits, faults and recoveries that a monitor saw since it began. Bounded."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from trainsync.api.page import News, NewsKind, SavePoint
from trainsync.api.protocol import SaveKind
from trainsync.api.status import ExplorerStatus
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core import explorer_events
from trainsync.monitor.core.views import CoreView, RestartView
from trainsync.monitor.ledger.saves import CommittedInfo

_SAVES_KEPT: Final = 2000
_NEWS_KEPT: Final = 100


class Journal(NullObserver):
    """Told of commits by the core's thread, and shown views of the core by the event loop."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.since = clock()
        self._clock = clock
        self._lock = threading.Lock()
        self._saves: deque[SavePoint] = deque(maxlen=_SAVES_KEPT)
        self._news: deque[News] = deque(maxlen=_NEWS_KEPT)
        self._attempt: int | None = None
        self._restarts: tuple[int | None, int] = (None, 0)
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
        """The other entries, oldest first."""
        return list(self._news)

    def see(self, view: CoreView) -> None:
        """Keep what differs from the view before. For one thread."""
        self._see_attempt(view.attempt)
        self._see_restarts(view.attempt, view.restarts)
        self._see_error(view.checkpoint.last_error)
        now = {e.id: e for e in view.weights.explorers} if view.weights is not None else {}
        changes = explorer_events.between(self._explorers, now)
        self._explorers = now
        for kind, text in (
            (NewsKind.FAULT, changes.lost),
            (NewsKind.FAULT, changes.refused),
            (NewsKind.RECOVERY, changes.back),
        ):
            if text is not None:
                self._tell(kind, text)

    def _see_restarts(self, attempt: int | None, restarts: RestartView) -> None:
        before, self._restarts = self._restarts, (attempt, restarts.count)
        if before[0] == attempt and restarts.count > before[1]:
            why = f": {restarts.reason}" if restarts.reason else "."
            text = f"Attempt {attempt} was restarted in its pods ({restarts.count}){why}"
            self._tell(NewsKind.FAULT, text)

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
