"""An explorer's copy of the buckets that it fetched, and what deltas make of them."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from trainsync.weights.delta.codec import apply
from trainsync.weights.delta.compiling import prepare
from trainsync.weights.errors import DeltaError, DigestMismatchError
from trainsync.weights.transports.object_store.packing import Bytes, digest_of
from trainsync.weights.versions import PartMeta

Place = tuple[int, int]
"""Rank and bucket."""


@dataclass(frozen=True)
class _FetchedBucket:
    schema: bytes
    digest: str
    arrays: list[Bytes]


class HeldBuckets:
    """Buckets in memory of this process, each with the digest that it should have. One thread.

    Raises:
        DeltaError: as `prepare`.
    """

    def __init__(self) -> None:
        prepare()
        self._held: dict[Place, _FetchedBucket] = {}

    def based(self, part: PartMeta, place: Place) -> bool:
        """Whether there is a delta that starts from the bytes that are here."""
        held = self._of(part, place)
        base = part.bases[place[1]] if part.bases else ""
        return held is not None and held.digest == base != part.digests[place[1]]

    def change(self, part: PartMeta, place: Place, deltas: Sequence[Bytes]) -> None:
        """Bring a bucket to the new version, as far as its delta goes: `current` checks it.

        Raises:
            DeltaError: the delta is damaged or made for something else. Nothing is kept.
        """
        held = self._held.pop(place)
        if len(deltas) != len(held.arrays):
            raise DeltaError(f"{len(deltas)} deltas came for {len(held.arrays)} arrays")
        for array, delta in zip(held.arrays, deltas, strict=True):
            if delta.size:
                apply(delta, array)
        self._held[place] = _FetchedBucket(held.schema, part.digests[place[1]], held.arrays)

    def current(self, part: PartMeta, place: Place) -> list[Bytes] | None:
        """The bucket of the new version, whose bytes are checked; None if it is not here.

        It changes with the next version.

        Raises:
            DigestMismatchError: it should be, and is not. Nothing is kept.
        """
        held, expected = self._of(part, place), part.digests[place[1]]
        if held is None or held.digest != expected:
            return None
        if (found := digest_of(held.arrays)) != expected:
            del self._held[place]
            raise DigestMismatchError(
                f"the bucket after the delta has {found}, expected {expected}"
            )
        return held.arrays

    def keep(self, part: PartMeta, place: Place, arrays: Sequence[Bytes]) -> list[Bytes]:
        """A copy of a whole bucket that was checked."""
        self._held.pop(place, None)  # free it first
        copies = [array.copy() for array in arrays]
        self._held[place] = _FetchedBucket(part.schema, part.digests[place[1]], copies)
        return copies

    def retain(self, wanted: Container[Place]) -> None:
        """Let go of every other bucket."""
        for place in [place for place in self._held if place not in wanted]:
            del self._held[place]

    def close(self) -> None:
        """Give the memory back."""
        self._held.clear()

    def _of(self, part: PartMeta, place: Place) -> _FetchedBucket | None:
        held = self._held.get(place)
        return held if held is not None and held.schema == part.schema else None
