"""Counts and spaces the tries of a commit that the volume or a reader prevents. Pure."""

from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainsync.monitor.ledger.saves import SaveKey, SaveOwner

# Each takes `LOCK_SECONDS`. A reader that was stopped while it holds the lock never lets go of it.
_LOCK_TRIES: Final = 30
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


class CommitBackoff:
    """Counts what was tried for each save.

    Args:
        io_tries: how often the volume may refuse a save before the save has failed.
    """

    def __init__(self, io_tries: int) -> None:
        self._backoff = Backoff(io_tries)
        self._locked_out: Counter[SaveKey] = Counter()
        self._leased_since: dict[SaveKey, datetime] = {}

    @property
    def limit(self) -> int:
        """The number of times that the volume may refuse."""
        return self._backoff.limit

    def refused(self, key: SaveKey, now: datetime) -> tuple[int, bool]:
        """The volume refused the save: how often it has, and whether that was the last try."""
        return self._backoff.failed(key, now)

    def waits(self, key: SaveKey, now: datetime) -> bool:
        """Whether it is too early to try the save again after the volume refused it."""
        return self._backoff.waits(key, now)

    def locked_out(self, key: SaveKey) -> None:
        """A reader held the readers' lock for too long."""
        self._locked_out[key] += 1

    def leased(self, key: SaveKey, now: datetime) -> timedelta:
        """A reader holds the step that the save replaces; returns for how long that is so."""
        del self._locked_out[key]
        return now - self._leased_since.setdefault(key, now)

    def in_the_way(self, key: SaveKey, now: datetime) -> str | None:
        """Why the save is to be tried again soon, in words; None: no reason is known."""
        if self.waits(key, now):
            return "the volume refused it"
        if 0 < self._locked_out[key] < _LOCK_TRIES:
            return "a reader holds the readers' lock"
        return None

    def forget(self, key: SaveKey) -> None:
        """The save has ended."""
        self._backoff.keep(lambda other: other != key)
        del self._locked_out[key]
        self._leased_since.pop(key, None)

    def keep(self, owners: Set[SaveOwner]) -> None:
        """Forget saves of other owners, and every reader's lease."""
        self._backoff.keep(lambda key: key.owner in owners)
        for key in [key for key in self._locked_out if key.owner not in owners]:
            del self._locked_out[key]
        self._leased_since.clear()
