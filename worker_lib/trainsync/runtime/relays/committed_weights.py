"""Weights of committed steps, for the method ``checkpoint``. Without Ray: agents read them, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainsync.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadTimeoutError,
    lacks_memory,
)
from trainsync.checkpoint.load.stored_weights import stored_weights
from trainsync.checkpoint.load.whole_weights import whole_weights
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.manifest import Manifest
from trainsync.weights.errors import (
    DigestMismatchError,
    InconsistentUploadError,
    WeightsUnavailableError,
)


def read_weights(
    directory: Path, manifest: Manifest, *, deadline: float
) -> dict[str, torch.Tensor]:
    """`whole_weights`, with the errors that `trainsync.weights.transports.volume.fetcher` knows."""
    with _as_weights_errors():
        return whole_weights(directory, manifest, deadline=deadline)


def read_stored_weights(
    bucket: ObjectBucket, stored: Stored, *, deadline: float
) -> dict[str, torch.Tensor]:
    """`stored_weights`, with the errors that `trainsync.weights.transports.volume.stored` knows."""
    with _as_weights_errors():
        return stored_weights(bucket, stored, deadline=deadline)


@contextmanager
def _as_weights_errors() -> Iterator[None]:
    try:
        yield
    except LoadTimeoutError as error:
        raise WeightsUnavailableError(str(error)) from error
    except CorruptCheckpointError as error:
        raise DigestMismatchError(str(error)) from error
    except CheckpointError as error:
        raise InconsistentUploadError(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise WeightsUnavailableError(f"there is no memory for them: {error}") from error
