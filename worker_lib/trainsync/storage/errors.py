"""Errors of a run's directory. (A failing disk stays an `OSError`.)"""

from pathlib import Path


class StorageError(Exception):
    """Base of the errors of this package."""


class UnsafePathError(StorageError):
    """A path leaves the directory it belongs to, or goes through a symbolic link."""


class DamagedFileError(StorageError):
    """A file of ours cannot be understood."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class DanglingPointerError(StorageError):
    """A pointer names a step that has no valid manifest, and there is no other to repair it to."""


class PointerChangedError(StorageError):
    """Another process moved a pointer while it was about to be written."""


class FileCheckError(StorageError):
    """A file is missing, or its size or digest is not what its receipt or manifest says."""


class PromotionConflictError(StorageError):
    """A file to be promoted would replace a different file that another manifest lists."""


class ClaimTakenError(StorageError):
    """The attempt is claimed by another incarnation on this cluster."""

    def __init__(self, attempt: int, cluster: str, holder: str) -> None:
        super().__init__(
            f"attempt {attempt} of cluster {cluster!r} is claimed by incarnation {holder}: "
            "an entrypoint runs once per attempt"
        )
        self.holder = holder


class LockTimeoutError(StorageError):
    """Another process held a lock of the run's directory for longer than was waited."""


class StepHeldError(StorageError):
    """A reader holds a step that would be moved away; wait until the reader is done."""


class LeaseError(StorageError):
    """Base of what a reader of a committed step can meet; see `trainsync.storage.leases`."""


class StepGoneError(LeaseError):
    """The step is not committed (any more): the reader came too late, or asked for a wrong one."""


class LeaseLostError(LeaseError):
    """The step could not be held until the reader was done: what was read may not be whole."""


class SecondWriterError(StorageError):
    """Two processes that live write the same participant of a save; names both."""
