"""Versions in the making: the parts that ranks have sent, until the last one comes. Pure."""

from dataclasses import dataclass, field
from typing import Any, Final

from trainsync.weights.errors import InconsistentUploadError
from trainsync.weights.versions import HeldPart, PartMeta

# Ranks are in step with one another, so a third incomplete version means that a part is lost.
_MAX_PENDING: Final = 2


@dataclass
class Pending:
    """One version; ``started`` when its first part was begun, ``parts`` by rank, with payloads."""

    started: float
    parts: dict[int, tuple[PartMeta, Any]] = field(default_factory=dict)


class PendingParts:
    """At most two incomplete versions; the older ones are dropped."""

    def __init__(self) -> None:
        self._versions: dict[int, Pending] = {}

    def add(
        self, version: int, part: PartMeta, payload: Any, started: float, *, again: bool
    ) -> Pending | None:
        """Take one rank's part; returns the version if that completes it.

        Args:
            started: when the upload of the part was begun.
            again: the same part may have come before.

        Raises:
            InconsistentUploadError: the rank sent already, or ranks disagree on the world size.
        """
        if not 0 <= part.rank < part.world_size:
            raise InconsistentUploadError(f"rank {part.rank} is not in [0, {part.world_size})")
        pending = self._versions.setdefault(version, Pending(started))
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
        if len(pending.parts) == part.world_size:
            return pending
        while len(self._versions) > _MAX_PENDING:
            del self._versions[min(self._versions)]
        return None

    def drop(self, version: int) -> None:
        """Forget this version and those before it."""
        self._versions = {v: p for v, p in self._versions.items() if v > version}

    def held(self) -> list[HeldPart]:
        """Every part, oldest version first."""
        return [
            HeldPart(version, meta, payload)
            for version, pending in sorted(self._versions.items())
            for meta, payload in pending.parts.values()
        ]
