"""How many monitors may be replaced at a time.

A new release of the operator, or a new default image, changes the Deployment of every monitor.
Until the new pod is ready a run commits nothing, and a thousand new pods at once are a burden of
their own.
"""

from datetime import datetime, timedelta
from typing import Final

MOST_AT_ONCE: Final = 10
# A monitor that is not ready by then gives its place to the next one: its image may be a wrong one.
PLACE_FOR: Final = timedelta(minutes=2)


class Rolls:
    """Places for monitors that are being replaced; a new operator begins with all of them free."""

    def __init__(self) -> None:
        self._since: dict[str, datetime] = {}

    def ready(self, uid: str) -> None:
        """The monitor of the run ``uid`` is ready, so that its place is free."""
        self._since.pop(uid, None)

    def may(self, uid: str, now: datetime) -> bool:
        """Whether the monitor of the run ``uid`` may be replaced now; takes a place for it."""
        self._since = {k: since for k, since in self._since.items() if now - since < PLACE_FOR}
        if uid in self._since:
            return True
        if len(self._since) >= MOST_AT_ONCE:
            return False
        self._since[uid] = now
        return True
