"""A version of the weights, described: plain data that crosses processes."""

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from trainsync.weights.synchronizer.counts import Sent

# How the bytes of a version travel: through Ray's object store, by a broadcast, by the volume.
MEMORY: Final = "memory"
NCCL: Final = "nccl"
CHECKPOINT: Final = "checkpoint"


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
        method: ``memory``, ``nccl`` or ``checkpoint``: how the bytes travel.
        bytes: of all tensors.
    """

    version: int
    digest: str
    parts: tuple[PartMeta, ...]
    method: str
    bytes: int


@dataclass(frozen=True)
class CheckpointLocation:
    """A committed state dict on the run's volume.

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
    """

    meta: VersionMeta
    payloads: tuple[Any, ...] = ()
    location: CheckpointLocation | None = None

    @staticmethod
    def broadcast(version: int, digest: str, bytes: int) -> "Published":
        """A version that the trainer has broadcast."""
        return Published(VersionMeta(version, digest, (), NCCL, bytes))

    @staticmethod
    def saved(version: int, digest: str, bytes: int, location: CheckpointLocation) -> "Published":
        """A version that lies on the run's volume."""
        return Published(VersionMeta(version, digest, (), CHECKPOINT, bytes), location=location)


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
        ValueError: neither a broadcast version nor one with a location on the volume.
    """

    published: Published
    seconds: float = 0.0
    lost: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    served: Sequence[str] | None = None
    sent: Sent | None = None
    again: bool = False

    def __post_init__(self) -> None:
        method, location = self.published.meta.method, self.published.location
        if method not in (NCCL, CHECKPOINT) or (method == CHECKPOINT) != (location is not None):
            raise ValueError(
                f"a version is announced with method {NCCL}, or with {CHECKPOINT} and a location; "
                f"got {method!r} and {location}"
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
