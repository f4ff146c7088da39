"""What can go wrong while saving or loading, by name."""


class CheckpointError(Exception):
    """Base of every error of this package."""


class UnsupportedStateError(CheckpointError):
    """A state holds something that ``torch.load(weights_only=True)`` could not read back."""


class SaveFailedError(CheckpointError):
    """A background save failed; its cause is chained and the save is aborted for everybody."""


class SaveAbortedError(CheckpointError):
    """The monitor aborted a save; the message says why."""


class SaveTimeoutError(CheckpointError):
    """A save, or a commit, did not end within its deadline."""


class StepNotIncreasingError(CheckpointError):
    """A component was asked to save a step that is not after the last one it saved."""


class CorruptCheckpointError(CheckpointError):
    """A committed file is missing, cut short, or differs from its manifest."""


class WorldSizeMismatchError(CheckpointError):
    """A checkpoint was saved by another number of ranks than want to load it."""
