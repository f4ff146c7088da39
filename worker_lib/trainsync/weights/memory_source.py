"""The method ``memory`` on the explorer's side: parts out of Ray's object store."""

import time

import ray

from trainsync.weights.errors import DigestMismatchError, WeightsUnavailableError
from trainsync.weights.packing import Bytes, digest_of, unpack
from trainsync.weights.schema import Schema
from trainsync.weights.sources import Weights, WeightSource
from trainsync.weights.versions import PartMeta, Published, version_digest


class MemorySource(WeightSource):
    """Puts full tensors together from every rank's part."""

    def fetch(self, published: Published, timeout: float) -> Weights:
        """See `WeightSource`."""
        started = time.monotonic()
        try:
            arrays: list[Bytes] = ray.get(list(published.payloads), timeout=timeout)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ObjectLostError) as error:
            raise WeightsUnavailableError(
                f"version {published.meta.version} could not be fetched: {error}"
            ) from error
        meta = published.meta
        for array, part in zip(arrays, meta.parts, strict=True):
            _verify(array, part, meta.version)
        if version_digest(meta.version, meta.parts) != meta.digest:
            raise DigestMismatchError(f"version {meta.version}: its parts do not make its digest")
        schemas = [Schema.decode(part.schema) for part in meta.parts]
        tensors = unpack(list(zip(arrays, schemas, strict=True)))
        return Weights(meta.version, meta.digest, tensors, meta.bytes, time.monotonic() - started)


def _verify(array: Bytes, part: PartMeta, version: int) -> None:
    digest = digest_of(array)
    if array.nbytes != part.bytes or digest != part.digest:
        raise DigestMismatchError(
            f"version {version}, rank {part.rank}: {array.nbytes} bytes with {digest} arrived, "
            f"expected {part.bytes} bytes with {part.digest}"
        )
