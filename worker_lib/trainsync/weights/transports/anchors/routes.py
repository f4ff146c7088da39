"""Which objects bring an explorer to a version, with the fewest bytes; pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainsync.weights.transports.anchors.index import StoredObject, VersionRow


@dataclass(frozen=True)
class Route:
    """From what is held, or an anchor, over deltas to a version.

    Attributes:
        start: the digest that is held; None where it begins with ``anchor``.
        deltas: rows whose deltas follow, in order.
        rows: all rows that it needs, in order.
    """

    start: str | None
    anchor: VersionRow | None
    deltas: tuple[VersionRow, ...]

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """What is fetched, in order."""
        first = () if self.anchor is None else (self.anchor.anchor,)
        return tuple(one for one in (*first, *(row.delta for row in self.deltas)) if one)

    @property
    def rows(self) -> tuple[VersionRow, ...]:
        """All rows whose objects it needs."""
        return (*(() if self.anchor is None else (self.anchor,)), *self.deltas)

    @property
    def bytes(self) -> int:
        """That are fetched."""
        return sum(one.bytes for one in self.objects)


def route(
    rows: Sequence[VersionRow],
    target: VersionRow,
    held: Collection[str] = (),
    broken: Collection[str] = (),
) -> Route | None:
    """The cheapest route to ``target``, one of ``rows``; None when there is none.

    Args:
        held: digests of versions that are here.
        broken: keys of objects that are of no use.
    """
    best: Route | None = None
    deltas: list[VersionRow] = []
    at: int | None = max(number for number, row in enumerate(rows) if row == target)
    starts = bases(rows)
    while at is not None:
        row = rows[at]
        followed = tuple(reversed(deltas))
        if row.digest in held:
            best = _cheaper(best, Route(row.digest, None, followed))
        if row.anchor is not None and row.anchor.key not in broken:
            best = _cheaper(best, Route(None, row, followed))
        if row.delta is None or row.delta.key in broken:
            return best
        deltas.append(row)
        if row.base in held:
            best = _cheaper(best, Route(row.base, None, tuple(reversed(deltas))))
        at = starts[at]
    return best


def bases(rows: Sequence[VersionRow]) -> list[int | None]:
    """For each row the number of the one that its delta starts from, which is before it."""
    last: dict[str, int] = {}
    found: list[int | None] = []
    for number, row in enumerate(rows):
        found.append(None if row.base is None else last.get(row.base))
        last[row.digest] = number
    return found


def _cheaper(one: Route | None, other: Route) -> Route:
    return other if one is None or other.bytes < one.bytes else one
