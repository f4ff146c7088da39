"""Which versions stay in the store; pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trainsync.weights.transports.anchors.index import VersionRow
from trainsync.weights.transports.anchors.routes import bases


@dataclass(frozen=True)
class Retention:
    """How long versions stay that nothing needs.

    Args:
        versions: so many of the newest stay.
        seconds: younger ones stay, too.
        most: rows that the index has at most, also of versions that explorers could fold.
        grace_seconds: an object is removed so long after the index has ceased to name it.
    """

    versions: int = 16
    seconds: float = 3600.0
    most: int = 256
    grace_seconds: float = 900.0


@dataclass(frozen=True)
class Needed:
    """What explorers need.

    No checkpoint needs a version: a trainer that resumes publishes its weights again.

    Args:
        served: versions that explorers serve: they fold what came after.
    """

    served: Collection[int] = field(default_factory=tuple)


def retain(
    rows: Sequence[VersionRow], needed: Needed, rule: Retention, now: float
) -> tuple[VersionRow, ...]:
    """The rows that stay, in order; each can be reached from an anchor among them.

    The newest is always among them.
    """
    oldest_served = min(needed.served, default=None)
    count, starts = len(rows), bases(rows)
    stay: set[int] = set()
    for number, row in enumerate(rows):
        recent = count - number <= rule.versions or now - row.published_at < rule.seconds
        folded = oldest_served is not None and row.weight_version >= oldest_served
        bounded = count - number <= rule.most and (recent or folded)
        at: int | None = number if bounded else None
        while at is not None and at not in stay:
            stay.add(at)
            at = None if rows[at].anchor is not None else starts[at]
    return tuple(rows[number] for number in sorted(stay))
