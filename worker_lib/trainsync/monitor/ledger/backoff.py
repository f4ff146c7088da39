"""Bounded retries of what the volume refused, each save by itself, with growing waits. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainsync.monitor.ledger.saves import SaveKey

_FIRST_WAIT: Final = timedelta(seconds=1)


@dataclass(frozen=True)
class _Retry:
    tries: int
    not_before: datetime
    wait: timedelta


class Backoff:
    """At most ``limit`` tries of each save."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[SaveKey, _Retry] = {}

    def failed(self, key: SaveKey, now: datetime) -> tuple[int, bool]:
        """Another try failed: how many there were, and whether that was the last one."""
        tries = self._waiting[key].tries + 1 if key in self._waiting else 1
        if tries >= self.limit:
            self._waiting.pop(key, None)
            return tries, True
        wait = _FIRST_WAIT * 2 ** (tries - 1)
        self._waiting[key] = _Retry(tries, now + wait, wait)
        return tries, False

    def waits(self, key: SaveKey, now: datetime) -> bool:
        """Whether it is too early to try again."""
        retry = self._waiting.get(key)
        if retry is None:
            return False
        # A clock that was set back must not make a wait of seconds one of hours.
        return timedelta(0) < retry.not_before - now <= retry.wait

    def keep(self, wanted: Callable[[SaveKey], bool]) -> None:
        """Forget all other saves: they ended, or were superseded."""
        self._waiting = {key: retry for key, retry in self._waiting.items() if wanted(key)}
