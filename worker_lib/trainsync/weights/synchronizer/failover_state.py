"""A second copy of the Synchronizer's state, to rebuild the actor from. No I/O, no Ray.

The process that made the actor follows it, and so holds its references, never bytes. A trainer is
told that its part is taken once that process has it too.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainsync.weights.counts import SyncCounts, Traffic
from trainsync.weights.errors import WeightsError
from trainsync.weights.synchronizer.roster import RUNNING, Explorer, LossReason
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import Announcement, HeldPart, Published

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateChanges:
    """The parts since the revision that was asked for; the rest is always whole."""

    revision: int
    parts: tuple[HeldPart, ...]
    explorers: Mapping[str, Explorer]
    trainer_status: str
    announced: Published | None = None
    group: TrainerEndpoint | None = None
    counts: SyncCounts = field(default_factory=SyncCounts)
    losses: Mapping[LossReason, int] = field(default_factory=dict)
    withdrawn: int | None = None  # the version whose bytes are let go of
    missed: int = -1  # the newest version that reached no explorer
    traffic: Traffic = field(default_factory=Traffic)
    aborted: Mapping[int, str] = field(default_factory=dict)
    rewinds: tuple[tuple[int, int], ...] = ()  # see `WeightsState`
    restarts: int = 0  # before the published version
    reopened: bool = False  # see `PublishedVersions`


@dataclass(frozen=True)
class RestoredState:
    """The start of a new Synchronizer. ``explorers`` get fresh leases."""

    floor: int
    parts: tuple[HeldPart, ...] = ()
    explorers: Mapping[str, Explorer] = field(default_factory=dict)
    trainer_status: str = RUNNING
    announced: Published | None = None
    group: TrainerEndpoint | None = None
    counts: SyncCounts = field(default_factory=SyncCounts)
    losses: Mapping[LossReason, int] = field(default_factory=dict)
    missed: int = -1
    traffic: Traffic = field(default_factory=Traffic)
    aborted: Mapping[int, str] = field(default_factory=dict)
    rewinds: tuple[tuple[int, int], ...] = ()
    restarts: int = 0
    reopened: bool = False


class PartJournal:
    """Parts that a Synchronizer accepted and its follower has not taken over."""

    def __init__(self) -> None:
        self.followed = 0  # revision up to which everything is taken over
        self._rows: list[tuple[int, HeldPart]] = []

    def add(self, revision: int, held: HeldPart, published: int) -> None:
        """Note a part; parts older than the ``published`` version are no longer of use."""
        self._rows = [row for row in self._rows if row[1].version >= published]
        self._rows.append((revision, held))

    def clear(self) -> None:
        """Forget all of them: none is of use any more."""
        self._rows = []

    def taken(self, seen: int) -> None:
        """The follower has everything up to revision ``seen``."""
        self.followed = max(self.followed, seen)
        self._rows = [row for row in self._rows if row[0] > seen]

    def parts(self) -> tuple[HeldPart, ...]:
        """The parts that the follower lacks, oldest first."""
        return tuple(held for _, held in self._rows)


class FailoverState:
    """A second copy of a Synchronizer's state, fed with its `StateChanges`."""

    def __init__(self, floor: int) -> None:
        self._state = WeightsState(floor)
        self._last: StateChanges | None = None

    def apply(self, changes: StateChanges) -> None:
        """Take over what is new."""
        for number, step in changes.rewinds:
            self._state.rewind(number, step)
        for held in changes.parts:
            try:
                self._state.upload(held.version, held.meta, held.payload, 0.0, again=True)
            except WeightsError as error:  # a part of a version that is replaced already
                logger.debug("a part is not remembered: %s", error)
        known, told = self._state.versions.published, changes.announced
        if told is not None and (
            told.meta.version > self._state.version
            or (known is not None and told.position > known.position)
        ):
            self._state.announce(Announcement(told), 0.0)
        if changes.reopened:
            self._state.versions.reopen(changes.restarts)
        if changes.withdrawn is not None and changes.withdrawn == self._state.version:
            self._state.versions.withdraw()
        self._last = changes

    def remembered(self) -> RestoredState:
        """The state to rebuild the Synchronizer from."""
        floor, parts = self._state.versions.floor, tuple(self._state.versions.held())
        if self._last is None:
            return RestoredState(floor, parts)
        return RestoredState(
            floor=floor,
            parts=parts,
            explorers=self._last.explorers,
            trainer_status=self._last.trainer_status,
            announced=self._state.versions.announced,
            group=self._last.group,
            counts=self._last.counts,
            losses=self._last.losses,
            missed=self._last.missed,
            traffic=self._last.traffic,
            aborted=self._last.aborted,
            rewinds=self._last.rewinds,
            restarts=self._state.versions.restarts,
            reopened=self._state.versions.reopened,
        )


def rebuild(remembered: RestoredState, lease_seconds: float, now: float) -> WeightsState:
    """A state with the same published version, which publishes none older than explorers serve."""
    state = WeightsState(remembered.floor, lease_seconds=lease_seconds, rebuilt=True)
    state.rewinds = remembered.rewinds
    if remembered.announced is not None:
        state.announce(Announcement(remembered.announced), now)
    for held in remembered.parts:
        # Before parts of the same step that were sent once more.
        if remembered.reopened and state.version == state.rewound[1]:
            state.versions.reopen(remembered.restarts)
        state.upload(held.version, held.meta, held.payload, now)
    if remembered.reopened:
        state.versions.reopen(remembered.restarts)
    state.group, state.versions.missed = remembered.group, remembered.missed
    state.versions.aborted.update(remembered.aborted)
    state.restore_explorers(remembered.explorers, now)
    state.restore_counts(remembered.counts, remembered.losses, remembered.traffic, now)
    state.trainer_status = remembered.trainer_status
    return state
