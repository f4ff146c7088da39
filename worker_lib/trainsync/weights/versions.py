"""Versions of the weights: their descriptions, which cross processes, and which one is published.

No I/O, no clock.
"""

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import xxhash

from trainsync.weights.buckets.schema import Schema
from trainsync.weights.counts import BroadcastTraffic
from trainsync.weights.errors import (
    InconsistentUploadError,
    NothingPublishedError,
    StaleVersionError,
    SupersededTrainerError,
)

# How the bytes of a version travel: through Ray's object store, by a broadcast, by the volume, by
# object storage.
MEMORY: Final = "memory"
NCCL: Final = "nccl"
CHECKPOINT: Final = "checkpoint"
STORE: Final = "store"

_MAX_CAUSE: Final = 512  # characters
_NO_PIECES: Final = Schema(()).encode()
# Ranks are in step with one another, so a third incomplete version means that a part is lost.
_MAX_PENDING: Final = 2


Position = tuple[int, int]
"""Restarts of the trainers before a version was published, and the version: later ones are greater.

Trainers that are restarted in place publish versions of the same numbers again, of other weights.
"""


@dataclass(frozen=True)
class PartMeta:
    """One trainer rank's share of a version, described.

    Attributes:
        digest: of the digests of its buckets.
        schema: `Schema.encode()`.
        digests: one per bucket.
        bases: of a part with deltas: for each bucket the digest of the one that its delta starts
            from; empty for a bucket without. Each delta is a payload of its own, after
            those of the buckets.
        node: id of the Ray node that uploaded it.
    """

    rank: int
    world_size: int
    bytes: int
    digest: str
    schema: builtins.bytes  # `bytes` is taken by the field above
    digests: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    node: str = ""


@dataclass(frozen=True)
class VersionMeta:
    """A published version, described.

    Attributes:
        digest: of what each method calls the version's bytes; equal bytes may have other digests
            under another method.
        parts: in the order of ranks; none where the bytes do not pass through the Synchronizer.
        method: ``memory``, ``nccl``, ``checkpoint`` or ``store``: how the bytes travel.
        bytes: of all tensors.
    """

    version: int
    digest: str
    parts: tuple[PartMeta, ...]
    method: str
    bytes: int


@dataclass(frozen=True)
class CheckpointLocation:
    """A committed state dict on the run's volume, or in its bucket.

    Attributes:
        path: the step's directory, relative to the run's directory.
        manifest_digest: sha256:<hex> of the manifest's file.
        attempt: that committed it, as the manifest says.
    """

    path: str
    manifest_digest: str
    attempt: int
    step: int


@dataclass(frozen=True)
class Published:
    """A version that explorers may take.

    Attributes:
        payloads: one per part, opaque here; None where the bytes made room for a newer version.
        location: where the bytes lie, of a version that travels through the volume.
        restarts: of the trainers in place, before it was published. The Synchronizer sets it.
    """

    meta: VersionMeta
    payloads: tuple[Any, ...] = ()
    location: CheckpointLocation | None = None
    restarts: int = 0

    @property
    def position(self) -> Position:
        """Its place among all versions of the attempt."""
        return self.restarts, self.meta.version

    @staticmethod
    def broadcast(version: int, digest: str, bytes: int) -> "Published":
        """A version that the trainer has broadcast."""
        return Published(VersionMeta(version, digest, (), NCCL, bytes))

    @staticmethod
    def saved(version: int, digest: str, bytes: int, location: CheckpointLocation) -> "Published":
        """A version that lies on the run's volume."""
        return Published(VersionMeta(version, digest, (), CHECKPOINT, bytes), location=location)

    @staticmethod
    def stored(version: int, digest: str, bytes: int) -> "Published":
        """A version that the store's index names."""
        return Published(VersionMeta(version, digest, (), STORE, bytes))


@dataclass(frozen=True)
class Announcement:
    """Tells the Synchronizer of a version whose bytes do not travel through Ray's object store.

    Attributes:
        published: the version; its digest is what explorers find of their bytes and acknowledge.
        seconds: that publishing has taken so far, such as for a broadcast.
        lost: explorers that did not get the version, and why: they are given up, and may rejoin.
        refused: explorers whose model the version does not fit, and why: they live, and are not
            waited for.
        served: explorers that have the version's bytes now. Explorers that lack the bytes are not
            waited for. None: every explorer can have them at any time.
        sent: bytes that travelled, of a broadcast.
        again: the answer to an earlier call was lost, or the version was sent once more: the same
            version is no error, and the state of explorers is noted.

    Raises:
        ValueError: a version that passes through Ray, or a location on the volume that is missing
            or too many.
    """

    published: Published
    seconds: float = 0.0
    lost: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    served: Sequence[str] | None = None
    sent: BroadcastTraffic | None = None
    again: bool = False

    def __post_init__(self) -> None:
        method, location = self.published.meta.method, self.published.location
        known = method in (NCCL, STORE, CHECKPOINT)
        if not known or (method == CHECKPOINT) != (location is not None):
            raise ValueError(
                f"a version is announced with method {NCCL} or {STORE}, or with {CHECKPOINT} and a "
                f"location; got {method!r} and {location}"
            )


@dataclass(frozen=True)
class HeldPart:
    """One accepted part, with its payload."""

    version: int
    meta: PartMeta
    payload: Any


def version_digest(version: int, parts: tuple[PartMeta, ...]) -> str:
    """One digest for a version: of the number and of the digest and schema of every part."""
    hasher = xxhash.xxh3_128(str(version).encode())
    for part in parts:
        hasher.update(f"{part.rank}/{part.world_size} {part.digest} ".encode())
        hasher.update(part.schema)
    return f"xxh3-128:{hasher.hexdigest()}"


@dataclass
class _Pending:
    """A version that lacks parts; ``started`` when the upload of its first part began."""

    started: float
    parts: dict[int, tuple[PartMeta, Any]] = field(default_factory=dict)  # by rank, with payloads

    def published(self, version: int) -> Published:
        """The version, which has all of its parts."""
        ordered = [self.parts[rank] for rank in range(len(self.parts))]
        metas = tuple(meta for meta, _ in ordered)
        total = sum(meta.bytes for meta in metas)
        meta = VersionMeta(version, version_digest(version, metas), metas, MEMORY, total)
        return Published(meta, tuple(payload for _, payload in ordered))


@dataclass(frozen=True)
class Completed:
    """A version that has all of its parts; ``started`` when the upload of the first one began."""

    published: Published
    started: float


class PublishedVersions:
    """The published version, at most two incomplete ones, and those that never came.

    Args:
        floor: the version before the first one that may be published.

    Attributes:
        floor: no version up to this one is published from now on.
        published: the published version; None before the first.
        missed: the newest version that reached no explorer; -1 for none.
        aborted: versions newer than the published one whose save was aborted, and why.
        reopened: the published version may be published once more: see `rewind`.
    """

    def __init__(self, floor: int = -1) -> None:
        self.floor = floor
        self.published: Published | None = None
        self.missed = -1
        self.aborted: dict[int, str] = {}
        self.reopened = False
        self._pending: dict[int, _Pending] = {}

    @property
    def version(self) -> int:
        """The published version; before the first one, the floor."""
        return self.floor if self.published is None else self.published.meta.version

    @property
    def offered(self) -> int:
        """The newest version that was published, or reached no explorer; -1 before the first."""
        return max(-1 if self.published is None else self.version, self.missed)

    @property
    def announced(self) -> Published | None:
        """The published version, if its bytes do not pass through Ray's object store."""
        travels = self.published is not None and self.published.meta.method != MEMORY
        return self.published if travels else None

    @property
    def withdrawn(self) -> bool:
        """Whether the published version's bytes are let go of."""
        return self.published is not None and None in self.published.payloads

    def current(self) -> Published:
        """The published version. Raises `NothingPublishedError` before the first."""
        if self.published is None:
            raise NothingPublishedError("no version is published yet")
        return self.published

    def has_newer(self, version: int, restarts: int = 0) -> bool:
        """Whether a version newer than this one, of after ``restarts``, can be fetched."""
        known = self.published
        return known is not None and not self.withdrawn and known.position > (restarts, version)

    def withdraw(self) -> None:
        """Let go of the published version's bytes; it stays published for those that serve it."""
        if self.published is not None:
            nothing = (None,) * len(self.published.payloads)
            self.published = replace(self.published, payloads=nothing)

    def rewind(self, step: int) -> None:
        """Training goes on from the weights of ``step`` anew, by other processes.

        Newer versions are forgotten: they are made again, of other weights. The version of ``step``
        may be published once more, since its bytes may be gone with the process that had them.
        """
        self.floor, self.missed = step - 1, -1
        for version in [version for version in self.aborted if version >= step]:
            del self.aborted[version]
        self._pending.clear()
        if self.published is not None and self.version > step:
            self.published = None
            self.aborted.clear()  # the version of the step comes next, and is newer than these
        self.reopened = self.published is not None and self.version == step

    @property
    def restarts(self) -> int:
        """`Published.restarts` of the published version; 0 before the first."""
        return 0 if self.published is None else self.published.restarts

    def reopen(self, restarts: int) -> None:
        """The published version is of before the last `rewind`, and is to be published again."""
        if self.published is not None:
            self.published, self.reopened = replace(self.published, restarts=restarts), True

    def _is_stale(self, version: int) -> bool:
        newest = max(self.version - self.reopened, self.floor)
        return version <= newest

    def has(self, version: int, part: PartMeta) -> bool:
        """Whether the part is one of the published version, which is not to be sent again."""
        meta = None if self.published is None or self.reopened else self.published.meta
        return meta is not None and meta.version == version and part in meta.parts

    def add_part(
        self, version: int, part: PartMeta, payload: Any, started: float, *, again: bool
    ) -> Completed | None:
        """Take one rank's part; returns the version, to be `publish`-ed, if that completes it.

        Args:
            started: when the upload of the part was begun.
            again: the same part may have come before.

        Raises:
            StaleVersionError: the version is not newer than the published one.
            InconsistentUploadError: the rank sent already, ranks disagree on the world size, or no
                rank has a tensor.
        """
        if self._is_stale(version):
            raise StaleVersionError(
                f"rank {part.rank} uploads version {version}, but version {self.version} is "
                "already published; versions must increase"
            )
        if not 0 <= part.rank < part.world_size:
            raise InconsistentUploadError(f"rank {part.rank} is not in [0, {part.world_size})")
        pending = self._pending.setdefault(version, _Pending(started))
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
        pending.started = min(pending.started, started)
        if len(pending.parts) < part.world_size:
            while len(self._pending) > _MAX_PENDING:
                del self._pending[min(self._pending)]
            return None
        published = pending.published(version)
        parts = published.meta.parts
        if published.meta.bytes == 0 and all(one.schema == _NO_PIECES for one in parts):
            self.drop(version)
            raise InconsistentUploadError(
                f"version {version} has no tensor; expected those of a model"
            )
        return Completed(published, pending.started)

    def check_announced(self, published: Published) -> None:
        """See that an announced version may be published.

        Raises:
            StaleVersionError: the version is not newer than the published one.
            SupersededTrainerError: a newer attempt announced before.
        """
        version = published.meta.version
        if self._is_stale(version):
            raise StaleVersionError(
                f"version {version} is announced, but version {self.version} is already "
                "published; versions must increase"
            )
        new = published.location
        old = None if self.published is None else self.published.location
        if new is not None and old is not None and new.attempt < old.attempt:
            raise SupersededTrainerError(
                f"attempt {new.attempt} announces version {version}, but attempt {old.attempt} "
                "has announced already"
            )

    def publish(self, published: Published) -> None:
        """Publish a version; incomplete versions that are no newer are dropped."""
        # Explorers that serve the version before go on without those aborted after it.
        for version in list(self.aborted):
            if version <= self.version or version == published.meta.version:
                del self.aborted[version]
        self.published, self.reopened = published, False
        self.drop(published.meta.version)

    def drop(self, version: int) -> None:
        """Forget the parts of this incomplete version and of those before it."""
        self._pending = {v: p for v, p in self._pending.items() if v > version}

    def note_missed(self, version: int) -> None:
        """A version reached no explorer, and is not published."""
        self.missed = max(self.missed, version)

    def note_aborted(self, version: int, cause: str) -> bool:
        """The save that carries ``version`` was aborted: it will never be published.

        False if that is no news, or of no use any more: a version as new is published.
        """
        if version <= self.version or version in self.aborted:
            return False
        self.aborted[version] = cause[:_MAX_CAUSE]
        self.note_missed(version)
        return True

    def held(self) -> list[HeldPart]:
        """Every part that counts: those of the published version, then of newer ones in order."""
        parts: list[HeldPart] = []
        if self.published is not None and self.announced is None:
            meta = self.published.meta
            rows = zip(meta.parts, self.published.payloads, strict=True)
            parts += [HeldPart(meta.version, part, payload) for part, payload in rows]
        return parts + [
            HeldPart(version, meta, payload)
            for version, pending in sorted(self._pending.items())
            for meta, payload in pending.parts.values()
        ]
