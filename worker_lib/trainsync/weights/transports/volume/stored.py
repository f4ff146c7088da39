"""The method ``checkpoint`` on the explorer's side: committed state dicts in the run's store.

Nothing is leased there, since to read is the only right that an explorer has. The monitor leaves a
state dict where it is for as long as `fetch` may take; one that is gone nevertheless is replaced.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import DamagedFileError, StepGoneError
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreError
from trainsync.storage.objects.manifests import Stored
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.errors import (
    DigestMismatchError,
    WeightsReplacedError,
    WeightsUnavailableError,
)
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.transports.volume.fetcher import as_fetched
from trainsync.weights.versions import CheckpointLocation, Published

_KIND = SaveKind.STATE_DICT


class ReadsStoredWeights(Protocol):
    """Puts the weights of a step in a store together; given in, as `ReadsWeights` is."""

    def __call__(
        self, bucket: ObjectBucket, stored: Stored, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        """Full CPU tensors that own their memory, every byte verified.

        Raises:
            As `ReadsWeights`, and StoreError: the store failed, or did not answer by ``deadline``,
            when ``bucket`` gives up. OSError is of this machine.
        """
        ...


class StoredStateDicts(WeightSource):
    """Reads what was announced, whole, before any of it is loaded.

    Args:
        bucket: of the run; with the right to read alone.
        expected: what the model takes; other weights are refused. None: anything.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        read: ReadsStoredWeights,
        *,
        expected: Sequence[TensorMeta] | None = None,
    ) -> None:
        self._bucket = bucket
        self._read = read
        self._expected = expected

    def fetch(self, published: Published, timeout: float) -> Weights:
        """See `WeightSource`."""
        started = time.monotonic()
        meta, location = published.meta, published.location
        what = f"version {meta.version}"
        if location is None:
            raise WeightsUnavailableError(f"{what} was published by {meta.method}, not committed")
        try:
            bucket = self._bucket.until(started + timeout)
            stored = _manifest(bucket, location, what)
            try:
                tensors = self._read(bucket, stored, deadline=started + timeout)
            except DigestMismatchError:
                _manifest(bucket, location, what)  # its objects are gone with it
                raise
        except DamagedFileError as error:
            raise DigestMismatchError(f"{what} is refused: {error}") from error
        except (StoreError, OSError) as error:  # a reader may need a file of this machine
            raise WeightsUnavailableError(f"{what} could not be read: {error}") from error
        return as_fetched(meta, tensors, self._expected, started)


def _manifest(bucket: ObjectBucket, location: CheckpointLocation, what: str) -> Stored:
    """The manifest that was announced. Raises `WeightsReplacedError`: it is another by now."""
    try:
        stored = commits.read_manifest(bucket, _KIND, location.step)
    except StepGoneError as error:
        raise WeightsReplacedError(f"{what} is gone: {error}") from error
    if stored.digest != location.manifest_digest:
        raise WeightsReplacedError(
            f"{what}: {bucket.name} holds {stored.digest} by now, expected "
            f"{location.manifest_digest} of attempt {location.attempt}"
        )
    return stored
