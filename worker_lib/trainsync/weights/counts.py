"""The Synchronizer's counts: bytes that explorers took, and synchronisations. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class TransferKind(StrEnum):
    """How bytes come to an explorer; counted by it."""

    WHOLE = "whole"  # all of a version, over the network
    DELTA = "delta"  # what changed, over the network
    SHARED_MEMORY = "shared_memory"  # read in memory of the trainer's host, or in Ray's store there
    PROCESS_GROUP = "process_group"  # from GPU to GPU
    VOLUME = "volume"  # read from a committed state dict
    PASSED_ON = "passed_on"  # of a store, from another explorer that has read it


@dataclass(frozen=True)
class BroadcastTraffic:
    """The outcome of one broadcast.

    Attributes:
        id: no other broadcast's, so that one that is told of twice counts once.
        taken: bytes that explorers serve now, by way.
        resends: passes over the weights after the first.
    """

    id: str
    taken: Mapping[TransferKind, int] = field(default_factory=dict)
    resends: int = 0


@dataclass(frozen=True)
class Traffic:
    """Counts over all versions of an attempt.

    Attributes:
        taken: bytes, by way.
        resends: see `BroadcastTraffic`.
        last: id of the broadcast that was counted last.
    """

    taken: Mapping[TransferKind, int] = field(default_factory=dict)
    resends: int = 0
    last: str = ""

    def took(self, taken: Mapping[TransferKind, int]) -> "Traffic":
        """With what one explorer took."""
        return replace(self, taken=Counter(self.taken) + Counter(taken))

    def with_sent(self, sent: BroadcastTraffic) -> "Traffic":
        """With a broadcast. They are told of one after the other: the last one again is nothing."""
        if sent.id == self.last:
            return self
        return replace(self.took(sent.taken), resends=self.resends + sent.resends, last=sent.id)


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
