"""The Synchronizer's state machine: versions and explorers. No I/O, no clock, no Ray.

A version is the trainer's global step. It is *published* once the parts of all trainer ranks are
there, or, where its bytes travel elsewhere, once it is announced. Only one version is published at
a time; explorers acknowledge the version that they serve.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainsync.weights.counts import (
    BroadcastTraffic,
    SyncClock,
    SyncCounts,
    Traffic,
    TransferKind,
)
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
)
from trainsync.weights.synchronizer.roster import (
    LOST,
    REQUIRE_SYNC,
    RUNNING,
    STOPPED,
    Explorer,
    LossReason,
    Roster,
    Serving,
    check_status,
)
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import (
    NCCL,
    Announcement,
    PartMeta,
    Published,
    PublishedVersions,
)

LEASE_SECONDS = 30.0


class WeightsState:
    """The versions, and which explorer serves which.

    Versions only go up: one that is not newer than ``floor`` or than the published is refused.

    Args:
        floor: the version before the first one that this attempt may publish: the step resumed
            from minus one, so that the version of an earlier attempt is never taken back.
        lease_seconds: how long an explorer may be silent.
        rebuilt: this state follows one that is gone. Explorers may then serve newer versions than
            are known here, which raise the floor.

    Attributes:
        group: where the trainer broadcasts from; None before it has said so.
        clock: how long synchronisations take.
        traffic: bytes that explorers took.
        rewinds: numbers of restarts after which training went on from an older step anew, and that
            step, in order; see `rewind`.
    """

    def __init__(
        self, floor: int = -1, *, lease_seconds: float = LEASE_SECONDS, rebuilt: bool = False
    ) -> None:
        self.versions = PublishedVersions(floor)
        self.roster = Roster(lease_seconds)
        self.trainer_status = RUNNING
        self.group: TrainerEndpoint | None = None
        self.clock = SyncClock()
        self.traffic = Traffic()
        self.rewinds: tuple[tuple[int, int], ...] = ()
        self._rebuilt = rebuilt

    @property
    def version(self) -> int:
        """The published version; before the first one, the floor."""
        return self.versions.version

    @property
    def explorers(self) -> Mapping[str, Explorer]:
        """The explorers that are registered, or lost, by id."""
        return self.roster.explorers

    @property
    def rewound(self) -> tuple[int, int]:
        """The last of `rewinds`; before the first, 0 and -1."""
        return self.rewinds[-1] if self.rewinds else (0, -1)

    # -- the trainer's side ---------------------------------------------------------------

    def rewind(self, number: int, step: int) -> bool:
        """The trainers were restarted in place and go on from ``step``: newer versions are no more.

        The same call again, or one from before, changes nothing.

        Args:
            number: of the restart, from 1.
        """
        if number <= self.rewound[0]:
            return False
        self.rewinds = (*self.rewinds, (number, step))
        self.versions.rewind(step)
        self.roster.rewind(step)
        self.clock.drop()
        self.trainer_status = RUNNING
        return True

    def check_trainer(self, restarts: int | None) -> None:
        """Pass if a trainer is of those that train now.

        Args:
            restarts: in place, that came before it was made (`SynchronizerHandle`); None: not
                known.

        Raises:
            SupersededTrainerError: the trainers were restarted in place since.
        """
        if restarts is not None and restarts < self.rewound[0]:
            raise SupersededTrainerError(
                f"a call of trainers from after restart {restarts}, whom restart {self.rewound[0]} "
                "in place has replaced; publishers and paces are to be made anew, with a handle "
                "from RunContext.synchronizer()"
            )

    def upload(
        self,
        version: int,
        part: PartMeta,
        payload: Any,
        now: float,
        *,
        again: bool = False,
        seconds: float = 0.0,
    ) -> bool:
        """Take one rank's part; True when it completes the version, which then is published.

        Args:
            again: the answer to an earlier call was lost: the same part is no error.
            seconds: that the upload of the part has taken so far.

        Raises:
            StaleVersionError: the version is not newer than the published one.
            InconsistentUploadError: the rank sent already, ranks disagree on the world size, no
                rank has a tensor, or an explorer serves other bytes of this version.
        """
        if again and self.versions.has(version, part):
            return True
        completed = self.versions.add_part(version, part, payload, now - seconds, again=again)
        if completed is None:
            return False
        try:
            self.roster.check_served(version, completed.published.meta.digest)
        except InconsistentUploadError:
            self.versions.drop(version)
            raise
        self._publish(completed.published)
        self.clock.begin(completed.started)
        self._note_duration(now)
        return True

    def announce(self, announcement: Announcement, now: float) -> None:
        """Publish a version whose bytes travel elsewhere.

        The same announcement again publishes nothing, but the fate of explorers is noted.

        Raises:
            StaleVersionError: the version is not newer than the published one.
            SupersededTrainerError: a newer attempt announced before.
            InconsistentUploadError: an explorer serves other bytes of this version.
        """
        published, refused = self._stamped(announcement.published), announcement.refused
        version = published.meta.version
        if not (announcement.again and self.versions.published == published):
            self.versions.check_announced(published)
            self.roster.check_served(version, published.meta.digest)
            self._publish(published)
            self.clock.begin(now - announcement.seconds)
        self._note_sent(announcement.sent)
        self._note_lost(announcement.lost)
        for name in refused.keys() & self.explorers.keys():
            self.roster.refuse(name, version, refused[name]).returning = True
        if announcement.served is not None:
            self.roster.note_sent(version, frozenset(announcement.served))
        self._note_duration(now)

    def note_missed(
        self,
        version: int,
        now: float,
        lost: Mapping[str, str],
        refused: Mapping[str, str],
        sent: BroadcastTraffic | None = None,
    ) -> None:
        """A version was broadcast and reached no explorer, so that it is not published.

        Args:
            lost: explorers that are given up, and why.
            refused: explorers that could not take it, and why; they serve what they served.
            sent: what travelled nevertheless.
        """
        self._note_sent(sent)
        self.versions.note_missed(version)
        self._note_lost(lost)
        for name, cause in refused.items():
            if name in self.explorers:
                known = self.roster.refuse(name, version, f"it refused version {version}: {cause}")
                known.returning = known.version < self.version  # else it has the newest version
        self._note_duration(now)

    def set_group(self, group: TrainerEndpoint) -> None:
        """The trainer broadcasts from there. Explorers that were connected must connect anew.

        Raises:
            SupersededTrainerError: a newer attempt broadcasts already.
        """
        if self.group is not None and group.attempt < self.group.attempt:
            raise SupersededTrainerError(
                f"attempt {self.group.attempt} broadcasts already; this is attempt {group.attempt}"
            )
        if group != self.group:
            self.group = group
            self.roster.forget_ready()

    def make_room(self, version: int) -> bool:
        """Let go of the published version's bytes, since ``version`` is about to be uploaded.

        False if that one is no newer, or while an explorer that lives lacks the published one.
        Explorers that come from now on wait for the newer version.
        """
        needed = any(
            known.version < self.version and known.status not in (LOST, STOPPED)
            for known in self.explorers.values()
        )
        if version <= self.version or needed:
            return False
        self.versions.withdraw()
        return True

    def set_trainer_status(self, status: str) -> None:
        """Set the trainer's status; after ``stopped`` no version will come."""
        check_status(status)
        self.trainer_status = status

    # -- the explorers' side --------------------------------------------------------------

    def lag(self, explorer: str) -> int:
        """Training steps between the version that was offered last and what the explorer serves.

        One that serves nothing yet (-1) lags behind by one more than the version's number.
        """
        return max(0, self.versions.offered - self.roster.get(explorer).version)

    def register(self, explorer: str, session: str, now: float) -> None:
        """An explorer joins, or comes back as a new process with nothing loaded."""
        self._forgive(self.roster.register(explorer, session, now))

    def rejoin(self, explorer: str, session: str, serving: Serving | None, now: float) -> None:
        """The same process comes back, and goes on with what it serves.

        Raises:
            ExplorerReplacedError: another process lives under this id.
            StaleVersionError: it claims a version that never was.
        """
        no_more = serving is not None and self._is_lost(*serving.position)
        if serving is not None and not no_more:
            if serving.restarts >= self.rewound[0]:
                self._believe(explorer, serving.version)
            published = self.versions.published
            if published is not None and serving.position == published.position:
                serving = serving if serving.digest == published.meta.digest else None
        known = self.roster.rejoin(explorer, session, serving, now, no_more=no_more)
        if known.loaded[0] < self.rewound[0] and known.version == self.rewound[1]:
            known.digest = None  # see `Roster.rewind`
        self._forgive(known)
        if self.versions.published is not None and known.version >= self.version:
            known.returning = False
        else:
            known.status = REQUIRE_SYNC
        self._note_duration(now)

    def restore_explorers(self, explorers: Mapping[str, Explorer], now: float) -> None:
        """Take over the explorers of the state before this one."""
        for name, explorer in explorers.items():
            self._believe(name, explorer.version)
        self.roster.restore(explorers, now)

    def restore_counts(
        self, counts: SyncCounts, losses: Mapping[LossReason, int], traffic: Traffic, now: float
    ) -> None:
        """Take over the counts of the state before this one. Call it last."""
        behind = self.versions.published is not None and bool(self.roster.behind(self.version))
        self.clock = SyncClock(counts, now if behind else None)
        self.roster.losses = Counter(losses)
        self.traffic = traffic

    def renew(
        self,
        explorer: str,
        session: str,
        now: float,
        serving: Serving | None = None,
        *,
        ready: bool = False,
    ) -> bool:
        """The explorer lives; True if what it is ``serving``, or whether ``ready``, is news.

        An acknowledgement may have died with the state before this one.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError; as `acknowledge` does.
        """
        known = self.roster.renew_lease(explorer, session, now)
        news = self.roster.note_ready(known, ready=ready)
        if serving is None or serving.position <= known.loaded:
            return news
        version, digest, restarts = serving.version, serving.digest, serving.restarts
        self.acknowledge(explorer, session, version, digest, now, serving.taken, restarts)
        return True

    def leave(self, explorer: str, now: float, session: str | None = None) -> None:
        """An explorer goes; a second call is no error."""
        self.roster.leave(explorer, session)
        self._note_duration(now)

    def give_up(
        self, explorer: str, cause: str, now: float, loss: LossReason = LossReason.QUARANTINED
    ) -> None:
        """Wait for this explorer no longer; it may rejoin. Raises `UnknownExplorerError`."""
        self.roster.give_up(explorer, cause, loss)
        self._note_duration(now)

    def expire(self, now: float) -> list[str]:
        """Give up those that were silent for too long; returns their ids."""
        late = self.roster.expire(now)
        if late:
            self._note_duration(now)
        return late

    def refuse(
        self,
        explorer: str,
        session: str,
        version: int,
        cause: str,
        now: float,
        *,
        retries: bool = False,
    ) -> None:
        """The explorer cannot take ``version``, and goes on with what it serves.

        It is not waited for until it serves the published version, unless it ``retries``.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError.
        """
        self.roster.renew_lease(explorer, session, now)
        if version == self.version:  # or a newer one is on offer, which it may well take
            known = self.roster.refuse(explorer, version, cause)
            known.returning = known.returning or not retries
            self._note_duration(now)

    def set_explorer_status(self, explorer: str, session: str, status: str, now: float) -> None:
        """Set the explorer's status.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError, ValueError: for a status
                that is none.
        """
        check_status(status)
        self.roster.renew_lease(explorer, session, now).status = status
        self._note_duration(now)

    def acknowledge(
        self,
        explorer: str,
        session: str,
        version: int,
        digest: str,
        now: float,
        taken: Mapping[TransferKind, int] | None = None,
        restarts: int = 0,
    ) -> None:
        """The explorer serves ``version`` from now on.

        An acknowledgement of a version that was replaced meanwhile is true and is taken; one that
        goes back is not. After one of a version that is no more, the explorer serves none, whatever
        it served before: it has to take one anew.

        Args:
            taken: bytes that it took for the version, by way; they count once.
            restarts: `Published.restarts` of the version.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError, StaleVersionError,
                DigestMismatchError.
        """
        known = self.roster.renew_lease(explorer, session, now)
        position = restarts, version
        if position < known.loaded or version < known.version:
            raise StaleVersionError(
                f"explorer {explorer} acknowledges version {version} after "
                f"{max(known.version, known.loaded[1])}"
            )
        if self._is_lost(restarts, version):
            known.loaded, known.status = position, REQUIRE_SYNC
            known.lose()
            self._note_duration(now)
            return
        earlier = restarts < self.rewound[0]
        if not earlier:
            self._believe(explorer, version)
        if self.versions.published is not None and position == self.versions.published.position:
            expected = self.versions.published.meta.digest
            if digest != expected:
                known.status = REQUIRE_SYNC
                raise DigestMismatchError(
                    f"explorer {explorer} has {digest} for version {version}, expected {expected}"
                )
        if position > known.loaded:
            self.traffic = self.traffic.took(taken or {})
        known.version, known.loaded, known.status = version, position, RUNNING
        known.digest = None if earlier and version == self.rewound[1] else digest
        if version >= self.version:
            known.returning, known.cause = False, None
        self._note_duration(now)

    def _publish(self, published: Published) -> None:
        if self.versions.reopened:
            self.roster.forget_refusals()
        self.versions.publish(self._stamped(published))

    def _stamped(self, published: Published) -> Published:
        return replace(published, restarts=self.rewound[0])

    def _is_lost(self, restarts: int, version: int) -> bool:
        """Whether training went on from an older step after it was published."""
        return any(version > step for number, step in self.rewinds if number > restarts)

    def _forgive(self, explorer: Explorer) -> None:
        """Do not wait for an explorer that came after the broadcast: it gets the next version."""
        pushed = self.versions.published is not None and self.versions.published.meta.method == NCCL
        if pushed and explorer.version < self.version:
            explorer.returning = True

    def _believe(self, explorer: str, version: int) -> None:
        """Accept that ``version`` was published once; never publish an older one from now on."""
        if version <= self.version:
            return
        if not self._rebuilt:
            raise StaleVersionError(
                f"explorer {explorer} acknowledges version {version}, but the newest is "
                f"{self.version}"
            )
        self.versions.floor = max(self.versions.floor, version - 1)

    def _note_sent(self, sent: BroadcastTraffic | None) -> None:
        if sent is not None:
            self.traffic = self.traffic.with_sent(sent)

    def _note_lost(self, lost: Mapping[str, str]) -> None:
        # Looked up one by one: of many that are lost, `give_up` forgets the first.
        for name, cause in lost.items():
            if name in self.explorers:
                self.roster.give_up(name, cause, LossReason.TRANSFER)

    def _note_duration(self, now: float) -> None:
        """End the synchronisation when all that take part serve the published version."""
        if self.versions.published is None or self.roster.behind(self.version):
            return
        if any(explorer.version >= self.version for explorer in self.explorers.values()):
            self.clock.end(now)
        else:
            self.clock.drop()
