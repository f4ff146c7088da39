"""Queues writers for their permits: those of one scope write together. Pure.

A scope is what the save strategy lets write at the same time: a node, a process, or one thread.
First come, first served: a writer of the scope that holds waits behind one of another scope that
asked earlier, so that none starves. Holders and waiters that are not heard of for a while are
forgotten: they are dead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

TTL_SECONDS: Final = 30.0


@dataclass
class _Writer:
    scope: str
    label: str
    since: float
    ends: float


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    ``lost``: the caller held a permit that ended, and another scope holds now. ``held_by`` are the
    labels of the holders, ``ahead`` the number of writers that asked earlier.
    """

    granted: bool
    lost: bool
    held_by: tuple[str, ...]
    ahead: int


class PermitQueue:
    """See the module's docstring. Times are seconds of one monotonic clock.

    Args:
        ttl: a holder or waiter not heard of for so long is forgotten.
        quiet_until: before it only writers are granted that say that they hold already. A monitor
            that was restarted forgot the holders; one ``ttl`` later each has said so, or ended.
        on_granted: told how long a writer waited.
        on_ended: told when a holder was forgotten, or heard that it had been.
    """

    def __init__(
        self,
        ttl: float = TTL_SECONDS,
        *,
        quiet_until: float | None = None,
        on_granted: Callable[[float], None] = lambda _: None,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.ttl = ttl
        self._quiet_until = quiet_until
        self._on_granted = on_granted
        self._on_ended = on_ended
        self._holding: dict[str, _Writer] = {}
        self._waiting: dict[str, _Writer] = {}  # in the order in which they came
        self.revision = 0
        """Grows whenever a writer was granted or left."""

    def ask(
        self, holder: str, scope: str, now: float, *, label: str = "", held: bool = False
    ) -> Answer:
        """Ask, ask again (which keeps the place in the queue), or renew.

        Args:
            holder: unique name of this one write.
            held: it was granted before. It is granted again unless another scope holds, and never
                waits.
        """
        self.advance(now)
        if holder in self._holding:
            self._holding[holder].ends = now + self.ttl
        elif held:
            if self._scope() not in (None, scope):
                self._on_ended()
                return Answer(False, True, self._labels(), 0)
            self._waiting.pop(holder, None)
            self._holding[holder] = _Writer(scope, label, now, now + self.ttl)
            self.revision += 1
        else:
            writer = self._waiting.setdefault(holder, _Writer(scope, label, now, 0.0))
            writer.ends = now + self.ttl
            self._grant(now)
        granted = holder in self._holding
        ahead = 0 if granted else list(self._waiting).index(holder)
        return Answer(granted, False, self._labels(), ahead)

    def release(self, holder: str, now: float) -> None:
        """The write ended, or is not wanted any more; unknown ones are passed over."""
        held = self._holding.pop(holder, None)
        waited = self._waiting.pop(holder, None)
        if held is not None or waited is not None:
            self.revision += 1
        self.advance(now)

    def advance(self, now: float) -> None:
        """Forget dead writers, and grant to those that this lets in."""
        for name in [name for name, writer in self._holding.items() if now >= writer.ends]:
            del self._holding[name]
            self._on_ended()
            self.revision += 1
        for name in [name for name, writer in self._waiting.items() if now >= writer.ends]:
            del self._waiting[name]
            self.revision += 1
        self._grant(now)

    @property
    def holders(self) -> int:
        """The number of holders that write."""
        return len(self._holding)

    @property
    def waiters(self) -> int:
        """The number of holders that wait."""
        return len(self._waiting)

    def _grant(self, now: float) -> None:
        if self._quiet_until is not None and now < self._quiet_until:
            return
        for name, writer in list(self._waiting.items()):
            if self._scope() not in (None, writer.scope):
                return
            del self._waiting[name]
            self._holding[name] = writer
            writer.ends = now + self.ttl
            self._on_granted(now - writer.since)
            self.revision += 1

    def _scope(self) -> str | None:
        return next((writer.scope for writer in self._holding.values()), None)

    def _labels(self) -> tuple[str, ...]:
        return tuple(writer.label or name for name, writer in self._holding.items())
