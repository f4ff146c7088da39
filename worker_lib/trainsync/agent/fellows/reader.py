"""Reads committed versions from fellows first, and gives them on."""

from collections.abc import Mapping
from pathlib import Path

import torch

from trainsync.agent.fellows.fetching import from_pieces, from_volume
from trainsync.agent.fellows.holding import Holding
from trainsync.agent.fellows.versions import HeldVersions
from trainsync.storage.objects import parts
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.manifest import Manifest
from trainsync.weights.errors import DigestMismatchError, WeightsUnavailableError
from trainsync.weights.transports.volume.fetcher import ReadsWeights
from trainsync.weights.transports.volume.stored import ReadsStoredWeights


class FellowsReader:
    """Versions of a volume. See `ReadsWeights`. One thread.

    Args:
        read: puts weights together, and verifies each file again.
    """

    def __init__(self, read: ReadsWeights, held: HeldVersions) -> None:
        self._read = read
        self._held = held

    def __call__(
        self, directory: Path, manifest: Manifest, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        """See `ReadsWeights`. Where the memory has no room, the volume is read directly."""

        def take(holding: Holding, index: int, until: float) -> None:
            from_volume(directory, holding, index, until)

        folder = self._held.bring(manifest, "volume", take, deadline)
        return self._read(folder or directory, manifest, deadline=deadline)

    def make_room(self) -> bool:
        """See `HeldVersions`."""
        return self._held.make_room()

    def close(self) -> None:
        """Remove the files."""
        self._held.close()


class FellowsBucketReader:
    """Versions that are committed in a bucket. See `ReadsStoredWeights`. One thread.

    Args:
        read: puts weights together in this host's memory, and verifies each file again.
        read_bucket: puts weights together from the bucket, where the memory has no room.
    """

    def __init__(
        self, read: ReadsWeights, read_bucket: ReadsStoredWeights, held: HeldVersions
    ) -> None:
        self._read = read
        self._read_bucket = read_bucket
        self._held = held

    def __call__(
        self, bucket: ObjectBucket, stored: Stored, *, deadline: float
    ) -> Mapping[str, torch.Tensor]:
        """See `ReadsStoredWeights`."""

        def take(holding: Holding, index: int, until: float) -> None:
            _take(bucket, stored, holding, index, until)

        folder = self._held.bring(stored.manifest, "store", take, deadline)
        if folder is not None:
            try:
                return self._read(folder, stored.manifest, deadline=deadline)
            except OSError as error:
                raise WeightsUnavailableError(f"{folder} cannot be read: {error}") from error
        return self._read_bucket(bucket, stored, deadline=deadline)

    def make_room(self) -> bool:
        """See `HeldVersions`."""
        return self._held.make_room()

    def close(self) -> None:
        """Remove the files."""
        self._held.close()


def _take(
    bucket: ObjectBucket, stored: Stored, holding: Holding, index: int, deadline: float
) -> None:
    entry = holding.files[index]
    key = stored.keys[entry.path]
    try:
        blocks = parts.read_blocks(bucket, key, entry.bytes, stored.bases.get(entry.path))
        from_pieces(holding, index, blocks, f"{bucket.name}/{key}", deadline)
    except (ObjectMissingError, ObjectChangedError) as error:  # the manifest is looked at again
        raise DigestMismatchError(str(error)) from error
