"""How long synchronisations take, and how many there were. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncCounts:
    """How synchronisations went.

    Attributes:
        last_duration: seconds of the last one, from its first byte until all explorers that take
            part served it.
        syncs: how many ended so; those that no explorer took do not count.
    """

    last_duration: float | None = None
    syncs: int = 0


class SyncClock:
    """Measures one synchronisation after the other.

    Args:
        started: when the one that goes on was begun; None when there is none.
    """

    def __init__(self, counts: SyncCounts | None = None, started: float | None = None) -> None:
        self.counts = counts or SyncCounts()
        self._started = started

    def begin(self, started: float) -> None:
        """A version is published; the synchronisation before, if it did not end, is dropped."""
        self._started = started

    def end(self, now: float) -> None:
        """All explorers that take part serve the version. A second call is no error."""
        if self._started is not None:
            self.counts = SyncCounts(now - self._started, self.counts.syncs + 1)
            self._started = None

    def drop(self) -> None:
        """Measure nothing: no explorer serves the version, and none is waited for."""
        self._started = None
