"""How many monitors may be replaced at a time.

A new release of the operator, or a new default image, changes the Deployment of every monitor.
Until the new pod is ready a run commits nothing, and a thousand new pods at once are a burden of
their own.
"""

from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

MOST_AT_ONCE: Final = 10
# A monitor that is not ready by then gives its place to the next one: its image may be a wrong one.
PLACE_FOR: Final = timedelta(minutes=2)


class MonitorRollouts(Generic[Key]):
    """Places for monitors that are being replaced; a new operator begins with all of them free.

    A run that finds none waits in a line, without being looked at: a place that is freed is the
    next run's at once, and ``wake`` is told to look at it.
    """

    def __init__(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        self._since: dict[Key, datetime] = {}
        self._line: OrderedDict[Key, None] = OrderedDict()

    def may(self, key: Key, now: datetime) -> bool:
        """Whether the monitor of a run may be replaced now; if not, the run waits in the line."""
        self._pass_on(now)
        if key in self._since:
            return True
        if len(self._since) >= MOST_AT_ONCE:
            self._line[key] = None
            return False
        self._since[key] = now
        return True

    def done(self, key: Key, now: datetime) -> None:
        """The run needs no place: its monitor is replaced and ready, or it is gone."""
        self._line.pop(key, None)
        if self._since.pop(key, None) is not None:
            self._pass_on(now)

    def due(self, key: Key, now: datetime) -> list[datetime]:
        """When to look at the run again for its place's sake, that the next run may have it."""
        self._pass_on(now)
        return [self._since[key] + PLACE_FOR] if key in self._since else []

    def _pass_on(self, now: datetime) -> None:
        self._since = {k: since for k, since in self._since.items() if now - since < PLACE_FOR}
        while self._line and len(self._since) < MOST_AT_ONCE:
            key, _ = self._line.popitem(last=False)
            self._since[key] = now
            self._wake(key)
