"""Errors of saving and loading, by name."""

import errno
import os

from trainsync.api.protocol import is_skip
from trainsync.dist.errors import PeerError, PeerLostError


class CheckpointError(Exception):
    """Base of every error of this package."""


class UnsupportedStateError(CheckpointError):
    """A state holds something that ``torch.load(weights_only=True)`` could not read back."""


class SaveFailedError(CheckpointError):
    """A background save failed; its cause is chained and the save is aborted for all ranks."""


class SaveAbortedError(CheckpointError):
    """The monitor aborted a save; the message says why."""


class SaveSkippedError(SaveAbortedError):
    """A save was given up by a rank that had no staging memory free, as it was configured."""


def aborted_error(message: str, cause: str) -> SaveAbortedError:
    """The error for an abort with ``cause``, as a rank or the monitor reported it.

    A rank's cause begins with the name of what it raised: all that other processes have of it.
    """
    return SaveSkippedError(message) if is_skip(cause) else SaveAbortedError(message)


class UnsupportedPlaceError(CheckpointError):
    """The call needs a volume, and the run's checkpoints are in a store."""


class NotRegisteredError(CheckpointError):
    """A save is not registered, or the registration of a committed one did not name this part."""


class SaveAbandonedError(CheckpointError):
    """The process has to end before the save could be written."""


class CoordinatorClosedError(CheckpointError):
    """A save was asked for after the context that made the coordinator was closed."""


class ForkedError(CheckpointError, RuntimeError):
    """A child process uses what its parent made before the fork, whose threads it has not."""


class SaveTimeoutError(CheckpointError):
    """A save, or a commit, did not end within its deadline."""


class PermitTimeoutError(CheckpointError):
    """A writer was not allowed to write within its deadline; the message names the holders."""


class TornCopyError(CheckpointError):
    """Something was changed while it was being copied, so that the copy mixes two states."""


class UnguardedError(CheckpointError):
    """An overlapped save was asked for, and no optimizer waits for its copy."""


class StepNotIncreasingError(CheckpointError):
    """A component was asked to save a step that is not after the last one it saved."""


class CorruptCheckpointError(CheckpointError):
    """A committed file is missing, cut short, or differs from its manifest."""


class WorldSizeMismatchError(CheckpointError):
    """A checkpoint was saved by another number of ranks than want to load it."""


class StateMismatchError(CheckpointError):
    """A checkpoint does not fit the model, optimizer or data that is to take it."""


class LoadFailedError(CheckpointError, PeerError):
    """Another rank could not load its part; nothing changed here, unless the message says so."""


class LoadPeerLostError(LoadFailedError, PeerLostError):
    """Another rank has ended, or its process does not run, while ranks load together."""


class LoadTimeoutError(CheckpointError):
    """A committed step could not be read within its deadline."""


class MergeError(CheckpointError):
    """The shards of a step cannot be put together into one model; the message says why."""


def lacks_memory(error: Exception) -> bool:
    """Whether ``error`` says that there is no memory: torch has no class of its own for that."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and os.strerror(errno.ENOMEM) in str(error)
    )
