"""Counts what explorers' time was spent on: rollouts that were trained on, and others. Pure.

Nothing here reads a clock: every call says what time it is, in seconds that only go on.
"""

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from trainsync.api.protocol import RolloutSeconds

Key = tuple[str, int]


@dataclass
class RolloutClock:
    """Begins with the first explorer that takes part; see `RolloutSeconds`.

    Attributes:
        name: of this count, since a Synchronizer that is made again begins at 0.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    _began: float | None = None
    _seen: float = 0.0
    _present: int = 0
    _seconds_present: float = 0.0
    _used: float = 0.0
    _unused: float = 0.0
    _turns: dict[str, float] = field(default_factory=dict)  # when each explorer began its rollout
    _made: dict[Key, float] = field(default_factory=dict)  # seconds of each queued batch
    _ended: bool = False

    def see(self, explorers: Collection[str], queued: Iterable[Key], now: float) -> None:
        """These explorers take part, and these batches are queued; what is gone was in vain."""
        if self._began is None:
            if not explorers:
                return
            self._began = self._seen = now
        self._seconds_present += self._present * max(now - self._seen, 0.0)
        self._seen, self._present = max(now, self._seen), len(explorers)
        for name in self._turns.keys() - set(explorers):
            self._unused += max(now - self._turns.pop(name), 0.0)
        for key in self._made.keys() - set(queued):
            self._unused += self._made.pop(key)

    def turned(self, explorer: str, now: float) -> None:
        """An explorer begins a rollout; one that it did not end was in vain."""
        if (began := self._turns.pop(explorer, None)) is not None:
            self._unused += max(now - began, 0.0)
        self._turns[explorer] = now

    def delivered(self, key: Key, now: float, *, taken: bool) -> None:
        """An explorer has ended its rollout; the same again changes nothing."""
        if (began := self._turns.pop(key[0], None)) is None:
            return
        seconds = max(now - began, 0.0)
        if taken and not self._ended:
            self._made[key] = self._made.get(key, 0.0) + seconds
        else:
            self._unused += seconds

    def begun(self, keys: Iterable[Key]) -> None:
        """Training on these batches begins."""
        for key in keys:
            self._used += self._made.pop(key, 0.0)

    def end(self) -> None:
        """No step follows: batches that are queued, or come yet, are not trained on."""
        self._unused += sum(self._made.values())
        self._made.clear()
        self._ended = True

    def go_on(self) -> None:
        """Steps follow after all: the trainers were restarted."""
        self._ended = False

    def report(self) -> RolloutSeconds | None:
        """The counts up to what was seen last; None before any explorer took part."""
        if self._began is None:
            return None
        return RolloutSeconds(
            clock=self.name,
            loop=round(self._seen - self._began, 3),
            present=round(self._seconds_present, 3),
            used=round(self._used, 3),
            unused=round(self._unused, 3),
        )
