"""Versions as a publisher would have put them, without bytes."""

from collections.abc import Sequence

from trainsync.weights.transports.anchors.index import Owner, StoredObject, VersionRow

OWNER = Owner("run", 1, "abc")
FULL, DELTA = 1000, 10


def digest(number: int) -> str:
    return f"xxh3-128:{number:032x}"


def stored(number: int, kind: str, size: int) -> StoredObject:
    key = f"weights/run/1-abc/{number}-00000000.{kind}"
    return StoredObject(key, size, digest(number))


def row(number: int, *, anchor: bool = False, delta: bool = True, at: float = 0.0) -> VersionRow:
    """Version ``number``, whose delta starts from the one before."""
    return VersionRow(
        weight_version=number,
        attempt=1,
        bytes=FULL,
        digest=digest(number),
        published_at=at or float(number),
        base=digest(number - 1) if delta else None,
        delta=stored(number, "delta", DELTA) if delta else None,
        anchor=stored(number, "anchor", FULL) if anchor else None,
    )


def history(count: int, anchors: Sequence[int]) -> list[VersionRow]:
    """Versions 1 to ``count``; the first is an anchor alone."""
    return [
        row(number, anchor=number == 1 or number in anchors, delta=number > 1)
        for number in range(1, count + 1)
    ]
