"""The method ``memory`` on the explorer's side: parts out of Ray's object store."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray

from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.buckets.schema import Schema, check_cover
from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import (
    DeltaError,
    DigestMismatchError,
    InconsistentUploadError,
    WeightsUnavailableError,
)
from trainsync.weights.ray_errors import one_sentence
from trainsync.weights.transports.base import Weights, WeightSource, check_fit
from trainsync.weights.transports.object_store.assemble import Assembled
from trainsync.weights.transports.object_store.fetched_delta import HeldBuckets, Place
from trainsync.weights.transports.object_store.packing import Bytes, digest_of, digest_of_part
from trainsync.weights.transports.object_store.store import node_id
from trainsync.weights.versions import PartMeta, Published, version_digest

logger = logging.getLogger(__name__)

_Buckets = dict[Place, list[Bytes]]


class MemorySource(WeightSource):
    """Full tensors out of every rank's part: views of the store's memory where they can be.

    On the trainer's host nothing is copied; a tensor that came from several ranks is put together
    when it is asked for, so load one after the other.

    Args:
        wants: whether the tensor of this name is to be fetched; every one if it is not given. Only
            the buckets that hold a wanted tensor come here.
        expected: what the model takes of that; other weights are refused before a byte is fetched.
            None: anything.
        delta: keep a copy in memory of what came from another node, and fetch only what changed in
            it where the trainer uploads deltas.
    """

    def __init__(
        self,
        wants: Callable[[str], bool] | None = None,
        *,
        expected: Sequence[TensorMeta] | None = None,
        delta: bool = False,
    ) -> None:
        self._wants = wants
        self._expected = expected
        self._held = HeldBuckets() if delta else None
        self._tensors: Assembled | None = None

    def fetch(self, published: Published, timeout: float) -> Weights:
        """See `WeightSource`. Every byte that is handed out is checked before this returns."""
        started = time.monotonic()
        self.release()
        meta = published.meta
        schemas = [Schema.decode(part.schema) for part in meta.parts]
        check_cover(schemas)
        _check_digests(published)
        full = {piece.name: piece for schema in schemas for piece in schema.pieces}
        wanted = [name for name in full if self._wants is None or self._wants(name)]
        metas = [TensorMeta(n, full[n].dtype, full[n].itemsize, full[n].full_shape) for n in wanted]
        check_fit(meta.version, self._expected, metas)
        places = _needed(schemas, set(wanted))
        buckets, taken = self._bring(published, places, started + timeout)
        self._tensors = Assembled(
            [
                (schema, {bucket: arrays for (r, bucket), arrays in buckets.items() if r == rank})
                for rank, schema in enumerate(schemas)
            ],
            wanted,
        )
        seconds = time.monotonic() - started
        return Weights(
            meta.version, meta.digest, self._tensors, taken.total(), seconds, dict(taken)
        )

    def release(self) -> None:
        """See `WeightSource`."""
        if self._tensors is not None:
            self._tensors.release()
        self._tensors = None

    def close(self) -> None:
        """See `WeightSource`."""
        self.release()
        if self._held is not None:
            self._held.close()

    def _bring(
        self, published: Published, places: list[Place], deadline: float
    ) -> tuple[_Buckets, Counter[TransferKind]]:
        """The buckets, checked, and how many bytes were fetched for them, by way."""
        meta = published.meta
        buckets: _Buckets = {}
        taken: Counter[TransferKind] = Counter()
        far: set[Place] = set()
        here = node_id()
        if self._held is not None:
            far = _far(meta.parts, places, here)
            taken[TransferKind.DELTA] = self._change(self._held, published, far, deadline, buckets)
        rest = {place: place[1] for place in places if place not in buckets}
        for place, arrays in _get(published, rest, deadline).items():
            part = meta.parts[place[0]]
            _verify(arrays, part, place[1], meta.version)
            taken[TransferKind.SHARED_MEMORY if part.node == here else TransferKind.WHOLE] += _size(
                arrays
            )
            if self._held is not None and place in far:
                arrays = self._held.keep(part, place, arrays)
            buckets[place] = arrays
        return buckets, taken

    def _change(
        self,
        held: HeldBuckets,
        published: Published,
        far: set[Place],
        deadline: float,
        buckets: _Buckets,
    ) -> int:
        """Add to ``buckets`` those that need not be fetched; returns the bytes of their deltas."""
        meta = published.meta
        held.retain(far)
        based = {
            place: _delta_index(meta.parts[place[0]], place[1])
            for place in far
            if held.based(meta.parts[place[0]], place)
        }
        deltas = _get(published, based, deadline)
        for place in far:
            part = meta.parts[place[0]]
            try:
                if place in deltas:
                    held.change(part, place, deltas[place])
                arrays = held.current(part, place)
            except (DeltaError, DigestMismatchError) as error:
                where = "version %d, rank %d, bucket %d: the whole bucket is fetched: %s"
                logger.warning(where, meta.version, *place, error)
                continue
            if arrays is not None:
                buckets[place] = arrays
        return sum(map(_size, deltas.values()))


def _needed(schemas: list[Schema], wanted: set[str]) -> list[Place]:
    """Which buckets of which ranks hold a wanted tensor."""
    places = {
        (rank, piece.bucket): None
        for rank, schema in enumerate(schemas)
        for piece in schema.pieces
        if piece.name in wanted
    }
    return list(places)


def _far(parts: Sequence[PartMeta], places: Collection[Place], here: str) -> set[Place]:
    """Buckets of which a copy is worth its memory: from another node, and deltas of them come."""
    return {place for place in places if parts[place[0]].bases and parts[place[0]].node != here}


def _get(published: Published, indexes: Mapping[Place, int], deadline: float) -> _Buckets:
    """The object at an index of the payload of the place's rank, for each place."""
    try:
        references: list[Any] = [
            published.payloads[rank][index] for (rank, _), index in indexes.items()
        ]
        seconds = max(0.0, deadline - time.monotonic())
        return dict(zip(indexes, ray.get(references, timeout=seconds), strict=True))
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ObjectLostError) as error:
        raise WeightsUnavailableError(
            f"version {published.meta.version} could not be fetched: {one_sentence(error)}"
        ) from None


def _delta_index(part: PartMeta, bucket: int) -> int:
    """Where the delta of a bucket that has one is in the payload."""
    return len(part.digests) + sum(map(bool, part.bases[:bucket]))


def _size(arrays: Collection[Bytes]) -> int:
    return sum(array.nbytes for array in arrays)


def _check_digests(published: Published) -> None:
    """Check that digests are those published, and that there is an object for each bucket.

    Raises:
        DigestMismatchError, InconsistentUploadError.
    """
    meta = published.meta
    whole = version_digest(meta.version, meta.parts) == meta.digest
    if not whole or any(digest_of_part(part.digests) != part.digest for part in meta.parts):
        raise DigestMismatchError(f"version {meta.version}: its parts do not make its digest")
    for part, references in zip(meta.parts, published.payloads, strict=True):
        deltas = sum(map(bool, part.bases))
        wrong = bool(part.bases) and len(part.bases) != len(part.digests)
        if wrong or len(references) != len(part.digests) + deltas:
            raise InconsistentUploadError(
                f"version {meta.version}, rank {part.rank}: {len(references)} objects for "
                f"{len(part.digests)} buckets and {deltas} deltas"
            )


def _verify(arrays: list[Bytes], part: PartMeta, bucket: int, version: int) -> None:
    digest = digest_of(arrays)
    if digest != part.digests[bucket]:
        raise DigestMismatchError(
            f"version {version}, rank {part.rank}, bucket {bucket}: "
            f"{_size(arrays)} bytes with {digest} arrived, expected "
            f"{part.digests[bucket]}"
        )
