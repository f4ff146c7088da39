"""The Synchronizer's state machine: versions, parts, explorers. No I/O, no clock, no Ray.

A version is the trainer's global step. It is *published* once the parts of all trainer ranks are
there, or, where its bytes travel elsewhere, once it is announced. Only one version is published at
a time; explorers acknowledge what they serve.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
)
from trainsync.weights.link import Endpoint
from trainsync.weights.liveness import (
    LOST,
    REQUIRE_SYNC,
    RUNNING,
    STOPPED,
    Explorer,
    Loss,
    Roster,
    Serving,
    check_status,
)
from trainsync.weights.pending import Pending, PendingParts
from trainsync.weights.sync_counts import SyncClock, SyncCounts
from trainsync.weights.versions import (
    MEMORY,
    NCCL,
    HeldPart,
    PartMeta,
    Published,
    VersionMeta,
    version_digest,
)

LEASE_SECONDS = 30.0

_NOBODY: Mapping[str, str] = {}


class WeightsState:
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
        self.group: Endpoint | None = None
        self.roster = Roster(lease_seconds)
        self.clock = SyncClock()
        self._rebuilt = rebuilt
        self._pending = PendingParts()

    @property
    def version(self) -> int:
        """The published version; before the first one, the floor."""
        return self.floor if self.published is None else self.published.meta.version

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
        self, version: int, part: PartMeta, payload: Any, now: float, *, again: bool = False
    ) -> bool:
        """Take one rank's part; True when it completes the version, which then is published.

        Args:
            again: the answer to an earlier call was lost: the same part is no error.

        Raises:
            StaleVersionError: the version is not newer than the published one.
            InconsistentUploadError: the rank sent already, ranks disagree on the world size, or an
                explorer serves other bytes of this version.
        """
        if again and self._is_published(version, part):
            return True
        if version <= max(self.version, self.floor):
            raise StaleVersionError(
                f"rank {part.rank} uploads version {version}, but version {self.version} is "
                "already published; versions must increase"
            )
        pending = self._pending.add(version, part, payload, now, again=again)
        if pending is not None:
            self._publish(version, pending, now)
        return pending is not None

    def announce(
        self,
        published: Published,
        seconds: float,
        now: float,
        *,
        lost: Mapping[str, str] = _NOBODY,
        refused: Mapping[str, str] = _NOBODY,
        again: bool = False,
    ) -> None:
        """Publish a version whose bytes travel elsewhere.

        Args:
            seconds: how long it has taken so far.
            lost: explorers that are given up, and why.
            refused: explorers that cannot take it, and why; they live, and nobody waits for them.
            again: the answer to an earlier call was lost: the same version is no error.

        Raises:
            StaleVersionError: the version is not newer than the published one.
            SupersededTrainerError: a newer attempt announced before.
            InconsistentUploadError: an explorer serves other bytes of this version.
        """
        if again and self.published == published:
            return
        version = published.meta.version
        if version <= max(self.version, self.floor):
            raise StaleVersionError(
                f"version {version} is announced, but version {self.version} is already "
                "published; versions must increase"
            )
        self._check_location(published)
        self._check_served(published.meta)
        self._set_published(published, now - seconds)
        for name in lost.keys() & self.explorers.keys():
            self.roster.give_up(name, lost[name], Loss.TRANSFER)
        for name in refused.keys() & self.explorers.keys():
            self.roster.refuse(name, refused[name])
        self._note_duration(now)

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

    # -- the explorers' side --------------------------------------------------------------

    def lag(self, explorer: str) -> int:
        """Training steps between the published version and what the explorer serves.

        One that serves nothing yet (-1) lags behind by one more than the version's number.
        """
        known = self.roster.get(explorer)
        return 0 if self.published is None else max(0, self.version - known.version)

    def register(self, explorer: str, session: str, now: float) -> None:
        """An explorer joins, or comes back as a new process with nothing loaded."""
        self._forgive(self.roster.register(explorer, session, now))

    def rejoin(self, explorer: str, session: str, serving: Serving | None, now: float) -> None:
        """The same process comes back, and goes on with what it serves.

        Raises:
            ExplorerReplacedError: another process lives under this id.
            StaleVersionError: it claims a version that never was.
        """
        if serving is not None:
            self._believe(explorer, serving.version)
            meta = None if self.published is None else self.published.meta
            if meta is not None and serving.version == meta.version:
                serving = serving if serving.digest == meta.digest else None
        known = self.roster.rejoin(explorer, session, serving, now)
        self._forgive(known)
        if self.published is not None and known.version >= self.version:
            known.returning = False
        else:
            known.status = REQUIRE_SYNC
        self._note_duration(now)

    def restore_explorers(self, explorers: Mapping[str, Explorer], now: float) -> None:
        """Take over who was known to the state before this one."""
        for name, explorer in explorers.items():
            self._believe(name, explorer.version)
        self.roster.restore(explorers, now)

    def restore_counts(self, counts: SyncCounts, losses: Mapping[Loss, int], now: float) -> None:
        """Take over what had happened to the state before this one. Call it last."""
        behind = self.published is not None and bool(self.roster.behind(self.version))
        self.clock = SyncClock(counts, now if behind else None)
        self.roster.losses = Counter(losses)

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
        known = self.roster.speaks(explorer, session, now)
        news = known.ready != ready
        known.ready = ready
        if serving is None or serving.version <= known.version:
            return news
        self.acknowledge(explorer, session, serving.version, serving.digest, now)
        return True

    def leave(self, explorer: str, now: float, session: str | None = None) -> None:
        """An explorer goes; saying so twice is no error."""
        self.roster.leave(explorer, session)
        self._note_duration(now)

    def give_up(self, explorer: str, cause: str, now: float, loss: Loss = Loss.QUARANTINED) -> None:
        """Wait for this explorer no longer; it may rejoin. Raises `UnknownExplorerError`."""
        self.roster.give_up(explorer, cause, loss)
        self._note_duration(now)

    def expire(self, now: float) -> list[str]:
        """Give up those that were silent for too long; returns their ids."""
        late = self.roster.expire(now)
        if late:
            self._note_duration(now)
        return late

    def refuse(self, explorer: str, session: str, version: int, cause: str, now: float) -> None:
        """The explorer cannot take ``version``, and goes on with what it serves.

        Nobody waits for it until it serves what is published then.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError.
        """
        self.roster.speaks(explorer, session, now)
        if version == self.version:  # or a newer one is on offer, which it may well take
            self.roster.refuse(explorer, cause)
            self._note_duration(now)

    def set_explorer_status(self, explorer: str, session: str, status: str, now: float) -> None:
        """What the explorer does now.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError, ValueError: for a status
                that is none.
        """
        check_status(status)
        self.roster.speaks(explorer, session, now).status = status
        self._note_duration(now)

    def acknowledge(
        self, explorer: str, session: str, version: int, digest: str, now: float
    ) -> None:
        """The explorer serves ``version`` from now on.

        An acknowledgement of a version that was replaced meanwhile is true and is taken; one that
        goes back is not.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError, StaleVersionError,
                DigestMismatchError.
        """
        known = self.roster.speaks(explorer, session, now)
        if version < known.version:
            raise StaleVersionError(
                f"explorer {explorer} acknowledges version {version} after {known.version}"
            )
        self._believe(explorer, version)
        if self.published is not None and version == self.version:
            expected = self.published.meta.digest
            if digest != expected:
                known.status = REQUIRE_SYNC
                raise DigestMismatchError(
                    f"explorer {explorer} has {digest} for version {version}, expected {expected}"
                )
        known.version, known.digest, known.status = version, digest, RUNNING
        if version >= self.version:
            known.returning, known.cause = False, None
        self._note_duration(now)

    def _forgive(self, explorer: Explorer) -> None:
        """Wait for nobody who came after the broadcast: it gets the next version, not this one."""
        pushed = self.published is not None and self.published.meta.method == NCCL
        if pushed and explorer.version < self.version:
            explorer.returning = True

    def _believe(self, explorer: str, version: int) -> None:
        """Take it that ``version`` was published once; never publish an older one from now on."""
        if version <= self.version:
            return
        if not self._rebuilt:
            raise StaleVersionError(
                f"explorer {explorer} acknowledges version {version}, but the newest is "
                f"{self.version}"
            )
        self.floor = max(self.floor, version - 1)

    def _is_published(self, version: int, part: PartMeta) -> bool:
        meta = None if self.published is None else self.published.meta
        return meta is not None and meta.version == version and part in meta.parts

    def _publish(self, version: int, pending: Pending, now: float) -> None:
        ordered = [pending.parts[rank] for rank in range(len(pending.parts))]
        metas = tuple(meta for meta, _ in ordered)
        total = sum(meta.bytes for meta in metas)
        meta = VersionMeta(version, version_digest(version, metas), metas, MEMORY, total)
        try:
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
        self.published = published
        self._pending.drop(published.meta.version)
        self.clock.begin(started)

    def _note_duration(self, now: float) -> None:
        """A synchronisation ends when everybody who takes part serves the published version."""
        if self.published is not None and not self.roster.behind(self.version):
            self.clock.end(now)
