"""The Synchronizer's state machine: versions, parts, explorers. No I/O, no clock, no Ray.

A version is the trainer's global step. It is *published* once the parts of all trainer ranks are
there, and only one version is published at a time; explorers acknowledge what they serve.
"""

import builtins
from dataclasses import dataclass, field
from typing import Any

import xxhash

from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    StaleVersionError,
    UnknownExplorerError,
)

RUNNING = "running"  # serves weights, trains
REQUIRE_SYNC = "require_sync"  # waits for weights that it does not have
STOPPED = "stopped"
STATUSES = (RUNNING, REQUIRE_SYNC, STOPPED)

# Ranks are in step with one another, so a third incomplete version means that a part is lost.
_MAX_PENDING = 2


@dataclass(frozen=True)
class PartMeta:
    """One trainer rank's share of a version, described; ``schema`` is `Schema.encode()`."""

    rank: int
    world_size: int
    bytes: int
    digest: str
    schema: builtins.bytes  # `bytes` is taken by the field above


@dataclass(frozen=True)
class VersionMeta:
    """A published version, described. ``parts`` are in the order of ranks."""

    version: int
    digest: str
    parts: tuple[PartMeta, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Published:
    """A version that explorers may take; ``payloads`` (one per part) are opaque here."""

    meta: VersionMeta
    payloads: tuple[Any, ...]


@dataclass
class Explorer:
    """One explorer: the version that it serves (-1: none yet) and its status."""

    version: int = -1
    digest: str | None = None
    status: str = RUNNING


@dataclass
class _Pending:
    started: float
    parts: dict[int, tuple[PartMeta, Any]] = field(default_factory=dict)


def version_digest(version: int, parts: tuple[PartMeta, ...]) -> str:
    """One digest for a version: of the number and of the digest and schema of every part."""
    hasher = xxhash.xxh3_128(str(version).encode())
    for part in parts:
        hasher.update(f"{part.rank}/{part.world_size} {part.digest} ".encode())
        hasher.update(part.schema)
    return f"xxh3-128:{hasher.hexdigest()}"


class WeightsState:
    """Versions only go up: one that is not newer than ``floor`` or than the published is refused.

    Args:
        floor: the version before the first one that this attempt may publish: the step resumed
            from minus one, so that the version of an earlier attempt is never taken back.
    """

    def __init__(self, floor: int = -1) -> None:
        self.floor = floor
        self.trainer_status = RUNNING
        self.published: Published | None = None
        self.explorers: dict[str, Explorer] = {}
        self.last_duration: float | None = None
        self._pending: dict[int, _Pending] = {}
        self._published_started: float | None = None

    @property
    def version(self) -> int:
        """The published version; before the first one, the floor."""
        return self.floor if self.published is None else self.published.meta.version

    def upload(self, version: int, part: PartMeta, payload: Any, now: float) -> bool:
        """Take one rank's part; True when it completes the version, which then is published.

        Raises:
            StaleVersionError: the version is not newer than the published one.
            InconsistentUploadError: the rank sent already, or ranks disagree on the world size.
        """
        if version <= self.version:
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
        if part.rank in pending.parts:
            raise InconsistentUploadError(
                f"version {version}: rank {part.rank} uploaded it already"
            )
        pending.parts[part.rank] = (part, payload)
        if len(pending.parts) < part.world_size:
            self._drop_oldest_pending()
            return False
        ordered = [pending.parts[rank] for rank in range(part.world_size)]
        metas = tuple(meta for meta, _ in ordered)
        meta = VersionMeta(version, version_digest(version, metas), metas)
        self.published = Published(meta, tuple(held for _, held in ordered))
        self._pending = {v: p for v, p in self._pending.items() if v > version}
        self._published_started = pending.started
        self._note_duration(now)
        return True

    def lag(self, explorer: str) -> int:
        """Training steps between the published version and what the explorer serves.

        One that serves nothing yet (-1) lags behind by one more than the version's number.
        """
        return 0 if self.published is None else self.version - self._explorer(explorer).version

    def register(self, explorer: str) -> None:
        """An explorer joins, or comes back with nothing loaded (its process is new)."""
        if not explorer:
            raise UnknownExplorerError("an explorer needs a non-empty id")
        self.explorers[explorer] = Explorer()

    def leave(self, explorer: str, now: float) -> None:
        """An explorer goes; saying so twice is no error."""
        self.explorers.pop(explorer, None)
        self._note_duration(now)

    def set_explorer_status(self, explorer: str, status: str) -> None:
        """What the explorer does now.

        Raises:
            UnknownExplorerError, ValueError: for a status that is none.
        """
        _check_status(status)
        self._explorer(explorer).status = status

    def set_trainer_status(self, status: str) -> None:
        """What the trainer does now; after ``stopped`` no version will come."""
        _check_status(status)
        self.trainer_status = status

    def acknowledge(self, explorer: str, version: int, digest: str, now: float) -> None:
        """The explorer serves ``version`` from now on.

        An acknowledgement of a version that was replaced meanwhile is true and is taken; one that
        goes back is not.

        Raises:
            UnknownExplorerError, StaleVersionError, DigestMismatchError.
        """
        known = self._explorer(explorer)
        if version < known.version:
            raise StaleVersionError(
                f"explorer {explorer} acknowledges version {version} after {known.version}"
            )
        if version > self.version:
            raise StaleVersionError(
                f"explorer {explorer} acknowledges version {version}, but the newest is "
                f"{self.version}"
            )
        if self.published is not None and version == self.version:
            expected = self.published.meta.digest
            if digest != expected:
                known.status = REQUIRE_SYNC
                raise DigestMismatchError(
                    f"explorer {explorer} has {digest} for version {version}, expected {expected}"
                )
        known.version, known.digest, known.status = version, digest, RUNNING
        self._note_duration(now)

    def _explorer(self, explorer: str) -> Explorer:
        try:
            return self.explorers[explorer]
        except KeyError:
            raise UnknownExplorerError(
                f"explorer {explorer!r} is not registered; registered are {sorted(self.explorers)}"
            ) from None

    def _drop_oldest_pending(self) -> None:
        while len(self._pending) > _MAX_PENDING:
            del self._pending[min(self._pending)]

    def _note_duration(self, now: float) -> None:
        """A synchronisation ends when everybody who takes part serves the published version."""
        if self.published is None or self._published_started is None:
            return
        taking_part = [e for e in self.explorers.values() if e.status != STOPPED]
        if all(explorer.version >= self.version for explorer in taking_part):
            self.last_duration = now - self._published_started
            self._published_started = None


def _check_status(status: str) -> None:
    if status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r}")
