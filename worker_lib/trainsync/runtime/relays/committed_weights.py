"""Weights of committed steps, for the method ``checkpoint``. Without Ray: agents read them, too."""

from pathlib import Path

import torch

from trainsync.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadTimeoutError,
    lacks_memory,
)
from trainsync.checkpoint.load.whole_weights import whole_weights
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
    try:
        return whole_weights(directory, manifest, deadline=deadline)
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
