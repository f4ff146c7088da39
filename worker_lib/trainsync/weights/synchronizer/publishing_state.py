"""The trainer's half of the Synchronizer's state: parts, versions, announcements. No I/O, no clock.

See `trainsync.weights.synchronizer.state`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainsync.weights.buckets.schema import Schema
from trainsync.weights.errors import (
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
)
from trainsync.weights.synchronizer.pending import Pending, PendingParts
from trainsync.weights.synchronizer.roster import (
    LOST,
    RUNNING,
    STOPPED,
    Explorer,
    Loss,
    Roster,
    check_status,
)
from trainsync.weights.synchronizer.sync_counts import SyncClock
from trainsync.weights.synchronizer.traffic import Sent, Traffic
from trainsync.weights.transports.broadcast.link import Endpoint
from trainsync.weights.versions import (
    MEMORY,
    Announcement,
    HeldPart,
    PartMeta,
    Published,
    VersionMeta,
    version_digest,
)

LEASE_SECONDS = 30.0

_MAX_CAUSE = 512  # characters
_NO_PIECES = Schema(()).encode()


class PublishingState:
    """Versions only go up: one that is not newer than ``floor`` or than the published is refused.

    Args:
        floor: the version before the first one that this attempt may publish: the step resumed
            from minus one, so that the version of an earlier attempt is never taken back.
        lease_seconds: how long an explorer may be silent.
        rebuilt: this state follows one that is gone. What explorers serve may then be newer than
            what is known here, and raises the floor.
    """

    def __init__(
        self, floor: int = -1, *, lease_seconds: float = LEASE_SECONDS, rebuilt: bool = False
    ) -> None:
        self.floor = floor
        self.trainer_status = RUNNING
        self.published: Published | None = None
        self.missed = -1  # the newest version that reached nobody
        self.aborted: dict[int, str] = {}  # versions whose save was aborted, and why
        self.group: Endpoint | None = None
        self.roster = Roster(lease_seconds)
        self.clock = SyncClock()
        self.traffic = Traffic()
        self._rebuilt = rebuilt
        self._pending = PendingParts()

    @property
    def version(self) -> int:
        """The published version; before the first one, the floor."""
        return self.floor if self.published is None else self.published.meta.version

    @property
    def offered(self) -> int:
        """The newest version that was published, or that reached nobody; -1 before the first."""
        return max(-1 if self.published is None else self.version, self.missed)

    @property
    def announced(self) -> Published | None:
        """The published version, if its bytes do not pass through here."""
        travels = self.published is not None and self.published.meta.method != MEMORY
        return self.published if travels else None

    @property
    def explorers(self) -> Mapping[str, Explorer]:
        """Everybody who is registered, or lost."""
        return self.roster.explorers

    # -- the trainer's side ---------------------------------------------------------------

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
        if again and self._is_published(version, part):
            return True
        if version <= max(self.version, self.floor):
            raise StaleVersionError(
                f"rank {part.rank} uploads version {version}, but version {self.version} is "
                "already published; versions must increase"
            )
        pending = self._pending.add(version, part, payload, now - seconds, again=again)
        if pending is not None:
            self._publish(version, pending, now)
        return pending is not None

    def announce(self, announcement: Announcement, now: float) -> None:
        """Publish a version whose bytes travel elsewhere.

        The same announcement again publishes nothing, but what became of explorers is noted.

        Raises:
            StaleVersionError: the version is not newer than the published one.
            SupersededTrainerError: a newer attempt announced before.
            InconsistentUploadError: an explorer serves other bytes of this version.
        """
        published, refused = announcement.published, announcement.refused
        version = published.meta.version
        repeated = announcement.again and self.published == published
        if not repeated:
            self._announce_new(published, now - announcement.seconds)
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
        sent: Sent | None = None,
    ) -> None:
        """A version was broadcast and reached nobody, so that it is not published.

        Args:
            lost: explorers that are given up, and why.
            refused: explorers that could not take it, and why; they serve what they served.
            sent: what travelled nevertheless.
        """
        self._note_sent(sent)
        self.missed = max(self.missed, version)
        self._note_lost(lost)
        for name, cause in refused.items():
            if name in self.explorers:
                known = self.roster.refuse(name, version, f"it refused version {version}: {cause}")
                known.returning = known.version < self.version  # else it has what can be had
        self._note_duration(now)

    def note_aborted(self, version: int, cause: str) -> bool:
        """The save that carries ``version`` was aborted: it can never be had.

        False if that is no news, or of no use any more: a version as new is published.
        """
        if version <= self.version or version in self.aborted:
            return False
        self.aborted[version] = cause[:_MAX_CAUSE]
        self.missed = max(self.missed, version)
        return True

    def _note_sent(self, sent: Sent | None) -> None:
        if sent is not None:
            self.traffic = self.traffic.with_sent(sent)

    def _note_lost(self, lost: Mapping[str, str]) -> None:
        # Looked up one by one: of many that are lost, `give_up` forgets the first.
        for name, cause in lost.items():
            if name in self.explorers:
                self.roster.give_up(name, cause, Loss.TRANSFER)

    def _announce_new(self, published: Published, started: float) -> None:
        version = published.meta.version
        if version <= max(self.version, self.floor):
            raise StaleVersionError(
                f"version {version} is announced, but version {self.version} is already "
                "published; versions must increase"
            )
        self._check_location(published)
        self._check_served(published.meta)
        self._set_published(published, started)

    def set_group(self, group: Endpoint) -> None:
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

        False if that one is no newer, or while an explorer that lives lacks the published one. Who
        comes from now on waits for the newer version.
        """
        needed = any(
            known.version < self.version and known.status not in (LOST, STOPPED)
            for known in self.explorers.values()
        )
        if version <= self.version or needed:
            return False
        self.withdraw()
        return True

    def withdraw(self) -> None:
        """Let go of the published version's bytes; it stays published for those that serve it."""
        if self.published is not None:
            nothing = (None,) * len(self.published.payloads)
            self.published = replace(self.published, payloads=nothing)

    @property
    def withdrawn(self) -> bool:
        """Whether the published version's bytes are let go of."""
        return self.published is not None and None in self.published.payloads

    def set_trainer_status(self, status: str) -> None:
        """What the trainer does now; after ``stopped`` no version will come."""
        check_status(status)
        self.trainer_status = status

    def held(self) -> list[HeldPart]:
        """Every part that counts: those of the published version, then those of newer ones."""
        parts: list[HeldPart] = []
        if self.published is not None and self.announced is None:
            meta = self.published.meta
            rows = zip(meta.parts, self.published.payloads, strict=True)
            parts += [HeldPart(meta.version, part, payload) for part, payload in rows]
        return parts + self._pending.held()

    def _is_published(self, version: int, part: PartMeta) -> bool:
        meta = None if self.published is None else self.published.meta
        return meta is not None and meta.version == version and part in meta.parts

    def _publish(self, version: int, pending: Pending, now: float) -> None:
        ordered = [pending.parts[rank] for rank in range(len(pending.parts))]
        metas = tuple(meta for meta, _ in ordered)
        total = sum(meta.bytes for meta in metas)
        meta = VersionMeta(version, version_digest(version, metas), metas, MEMORY, total)
        try:
            if total == 0 and all(part.schema == _NO_PIECES for part in metas):
                raise InconsistentUploadError(
                    f"version {version} has no tensor; expected those of a model"
                )
            self._check_served(meta)
        except InconsistentUploadError:
            self._pending.drop(version)
            raise
        self._set_published(
            Published(meta, tuple(payload for _, payload in ordered)), pending.started
        )
        self._note_duration(now)

    def _check_served(self, meta: VersionMeta) -> None:
        for name, explorer in self.explorers.items():
            other = explorer.version == meta.version and explorer.digest != meta.digest
            if other and explorer.status != LOST:
                raise InconsistentUploadError(
                    f"version {meta.version} has digest {meta.digest}, but explorer {name} already "
                    f"serves a version {meta.version} with {explorer.digest}"
                )

    def _check_location(self, published: Published) -> None:
        new = published.location
        old = None if self.published is None else self.published.location
        if new is not None and old is not None and new.attempt < old.attempt:
            raise SupersededTrainerError(
                f"attempt {new.attempt} announces version {published.meta.version}, but attempt "
                f"{old.attempt} has announced already"
            )

    def _set_published(self, published: Published, started: float) -> None:
        # Who still serves the version before goes on without those that were aborted after it.
        for version in list(self.aborted):
            if version <= self.version or version == published.meta.version:
                del self.aborted[version]
        self.published = published
        self._pending.drop(published.meta.version)
        self.clock.begin(started)

    def _note_duration(self, now: float) -> None:
        """A synchronisation ends when everybody who takes part serves the published version."""
        if self.published is None or self.roster.behind(self.version):
            return
        if any(explorer.version >= self.version for explorer in self.explorers.values()):
            self.clock.end(now)
        else:
            self.clock.drop()
