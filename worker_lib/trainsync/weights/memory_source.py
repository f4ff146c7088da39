"""The method ``memory`` on the explorer's side: parts out of Ray's object store."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from trainsync.weights.assembling import Assembled
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    WeightsUnavailableError,
)
from trainsync.weights.packing import Bytes, digest_of, digest_of_part
from trainsync.weights.schema import Schema, check_cover
from trainsync.weights.sources import Weights, WeightSource
from trainsync.weights.versions import PartMeta, Published, version_digest

_Place = tuple[int, int]  # rank and bucket


class MemorySource(WeightSource):
    """Full tensors out of every rank's part: views of the store's memory where they can be.

    On the trainer's host nothing is copied; a tensor that came from several ranks is put together
    when it is asked for, so load one after the other.

    Args:
        wants: whether the tensor of this name is to be fetched; every one if it is not given. Only
            the buckets that hold a wanted tensor come here.
    """

    def __init__(self, wants: Callable[[str], bool] | None = None) -> None:
        self._wants = wants
        self._tensors: Assembled | None = None

    def fetch(self, published: Published, timeout: float) -> Weights:
        """See `WeightSource`. Every byte that is handed out is checked before this returns."""
        started = time.monotonic()
        self.release()
        meta = published.meta
        schemas = [Schema.decode(part.schema) for part in meta.parts]
        check_cover(schemas)
        _check_digests(published)
        names = dict.fromkeys(piece.name for schema in schemas for piece in schema.pieces)
        wanted = [name for name in names if self._wants is None or self._wants(name)]
        buckets = _get(published, _needed(schemas, set(wanted)), timeout)
        for (rank, bucket), arrays in buckets.items():
            _verify(arrays, meta.parts[rank], bucket, meta.version)
        self._tensors = Assembled(
            [
                (schema, {bucket: arrays for (r, bucket), arrays in buckets.items() if r == rank})
                for rank, schema in enumerate(schemas)
            ],
            wanted,
        )
        fetched = sum(array.nbytes for arrays in buckets.values() for array in arrays)
        seconds = time.monotonic() - started
        return Weights(meta.version, meta.digest, self._tensors, fetched, seconds)

    def release(self) -> None:
        """See `WeightSource`."""
        if self._tensors is not None:
            self._tensors.release()
        self._tensors = None


def _needed(schemas: list[Schema], wanted: set[str]) -> list[_Place]:
    """Which buckets of which ranks hold a wanted tensor."""
    places = {
        (rank, piece.bucket): None
        for rank, schema in enumerate(schemas)
        for piece in schema.pieces
        if piece.name in wanted
    }
    return list(places)


def _get(
    published: Published, places: list[_Place], timeout: float
) -> Mapping[_Place, list[Bytes]]:
    try:
        references: list[Any] = [published.payloads[rank][bucket] for rank, bucket in places]
        return dict(zip(places, ray.get(references, timeout=timeout), strict=True))
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ObjectLostError) as error:
        raise WeightsUnavailableError(
            f"version {published.meta.version} could not be fetched: {error}"
        ) from error


def _check_digests(published: Published) -> None:
    """What is said about the bytes is what was published, and there is an object for each bucket.

    Raises:
        DigestMismatchError, InconsistentUploadError.
    """
    meta = published.meta
    whole = version_digest(meta.version, meta.parts) == meta.digest
    if not whole or any(digest_of_part(part.digests) != part.digest for part in meta.parts):
        raise DigestMismatchError(f"version {meta.version}: its parts do not make its digest")
    for part, references in zip(meta.parts, published.payloads, strict=True):
        if len(references) != len(part.digests):
            raise InconsistentUploadError(
                f"version {meta.version}, rank {part.rank}: {len(references)} objects for "
                f"{len(part.digests)} buckets"
            )


def _verify(arrays: list[Bytes], part: PartMeta, bucket: int, version: int) -> None:
    digest = digest_of(arrays)
    if digest != part.digests[bucket]:
        raise DigestMismatchError(
            f"version {version}, rank {part.rank}, bucket {bucket}: "
            f"{sum(array.nbytes for array in arrays)} bytes with {digest} arrived, expected "
            f"{part.digests[bucket]}"
        )
