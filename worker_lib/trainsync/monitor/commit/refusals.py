"""What the volume or a path refuses, in the monitor's own errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainsync.monitor import errors
from trainsync.storage.errors import DanglingPointerError, StorageError, UnsafePathError


@contextmanager
def storage(doing: str) -> Iterator[None]:
    """Turn what the volume or a path refuses into a `MonitorError`."""
    try:
        yield
    except DanglingPointerError as error:
        raise errors.NoValidCheckpointError(str(error)) from error
    except UnsafePathError as error:
        raise errors.InvalidRequestError(str(error)) from error
    except (OSError, StorageError) as error:
        raise errors.StorageUnavailableError(f"{doing}: {type(error).__name__}: {error}") from error
