"""The Synchronizer's state machine: versions, parts, explorers. No I/O, no clock, no Ray.

A version is the trainer's global step. It is *published* once the parts of all trainer ranks are
there, and only one version is published at a time; explorers acknowledge what they serve.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    StaleVersionError,
)
from trainsync.weights.liveness import (
    LOST,
    REQUIRE_SYNC,
    RUNNING,
    Explorer,
    Roster,
    Serving,
    check_status,
)
from trainsync.weights.versions import (
    HeldPart,
    PartMeta,
    Published,
    VersionMeta,
    version_digest,
)

LEASE_SECONDS = 30.0

# Ranks are in step with one another, so a third incomplete version means that a part is lost.
_MAX_PENDING = 2


@dataclass
class _Pending:
    started: float
    parts: dict[int, tuple[PartMeta, Any]] = field(default_factory=dict)


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
        self.roster = Roster(lease_seconds)
        self.last_duration: float | None = None
        self._rebuilt = rebuilt
        self._pending: dict[int, _Pending] = {}
        self._published_started: float | None = None

    @property
    def version(self) -> int:
        """The published version; before the first one, the floor."""
        return self.floor if self.published is None else self.published.meta.version

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
        if not 0 <= part.rank < part.world_size:
            raise InconsistentUploadError(f"rank {part.rank} is not in [0, {part.world_size})")
        pending = self._pending.setdefault(version, _Pending(started=now))
        for other, _ in pending.parts.values():
            if other.world_size != part.world_size:
                raise InconsistentUploadError(
                    f"version {version}: rank {part.rank} says {part.world_size} ranks, "
                    f"rank {other.rank} says {other.world_size}"
                )
        held = pending.parts.get(part.rank)
        if held is not None and not (again and held[0] == part):
            raise InconsistentUploadError(
                f"version {version}: rank {part.rank} uploaded it already"
            )
        pending.parts[part.rank] = (part, payload)
        if len(pending.parts) < part.world_size:
            self._drop_oldest_pending()
            return False
        self._publish(version, pending, now)
        return True

    def set_trainer_status(self, status: str) -> None:
        """What the trainer does now; after ``stopped`` no version will come."""
        check_status(status)
        self.trainer_status = status

    def held(self) -> list[HeldPart]:
        """Every part that counts: those of the published version, then those of newer ones."""
        parts: list[HeldPart] = []
        if self.published is not None:
            meta = self.published.meta
            rows = zip(meta.parts, self.published.payloads, strict=True)
            parts += [HeldPart(meta.version, part, payload) for part, payload in rows]
        for version, pending in sorted(self._pending.items()):
            parts += [HeldPart(version, meta, payload) for meta, payload in pending.parts.values()]
        return parts

    # -- the explorers' side --------------------------------------------------------------

    def lag(self, explorer: str) -> int:
        """Training steps between the published version and what the explorer serves.

        One that serves nothing yet (-1) lags behind by one more than the version's number.
        """
        known = self.roster.get(explorer)
        return 0 if self.published is None else max(0, self.version - known.version)

    def register(self, explorer: str, session: str, now: float) -> None:
        """An explorer joins, or comes back as a new process with nothing loaded."""
        self.roster.register(explorer, session, now)

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

    def renew(
        self, explorer: str, session: str, now: float, serving: Serving | None = None
    ) -> bool:
        """The explorer lives; True if what it is ``serving`` was not known.

        An acknowledgement may have died with the state before this one.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError; as `acknowledge` does.
        """
        known = self.roster.speaks(explorer, session, now)
        if serving is None or serving.version <= known.version:
            return False
        self.acknowledge(explorer, session, serving.version, serving.digest, now)
        return True

    def leave(self, explorer: str, now: float, session: str | None = None) -> None:
        """An explorer goes; saying so twice is no error."""
        self.roster.leave(explorer, session)
        self._note_duration(now)

    def give_up(self, explorer: str, cause: str, now: float) -> None:
        """Wait for this explorer no longer; it may rejoin. Raises `UnknownExplorerError`."""
        self.roster.give_up(explorer, cause)
        self._note_duration(now)

    def expire(self, now: float) -> list[str]:
        """Give up those that were silent for too long; returns their ids."""
        late = self.roster.expire(now)
        if late:
            self._note_duration(now)
        return late

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
        known.returning = known.returning and version < self.version
        self._note_duration(now)

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

    def _publish(self, version: int, pending: _Pending, now: float) -> None:
        ordered = [pending.parts[rank] for rank in range(len(pending.parts))]
        metas = tuple(meta for meta, _ in ordered)
        meta = VersionMeta(version, version_digest(version, metas), metas)
        for name, explorer in self.explorers.items():
            other = explorer.version == version and explorer.digest != meta.digest
            if other and explorer.status != LOST:
                del self._pending[version]
                raise InconsistentUploadError(
                    f"version {version} has digest {meta.digest}, but explorer {name} already "
                    f"serves a version {version} with {explorer.digest}"
                )
        self.published = Published(meta, tuple(payload for _, payload in ordered))
        self._pending = {v: p for v, p in self._pending.items() if v > version}
        self._published_started = pending.started
        self._note_duration(now)

    def _drop_oldest_pending(self) -> None:
        while len(self._pending) > _MAX_PENDING:
            del self._pending[min(self._pending)]

    def _note_duration(self, now: float) -> None:
        """A synchronisation ends when everybody who takes part serves the published version."""
        if self.published is None or self._published_started is None:
            return
        if not self.roster.behind(self.version):
            self.last_duration = now - self._published_started
            self._published_started = None
