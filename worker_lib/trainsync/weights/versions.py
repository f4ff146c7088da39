"""A version of the weights, described: plain data that crosses processes."""

import builtins
from dataclasses import dataclass
from typing import Any

import xxhash


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
