"""Where a run's account lies: a file on its volume, or an object in its bucket."""

from collections.abc import Callable
from typing import Protocol

from trainsync.storage import atomic, records
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.bucket import Blob, ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError, ObjectExistsError
from trainsync.storage.objects.live import names


class AccountPlace(Protocol):
    """Both may raise `OSError` and `StorageError`."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def read(self) -> bytes | None:
        """The account as written last; None: there is none. Raises `DamagedFileError`, too."""
        ...

    def write(self, data: bytes) -> None:
        """Put ``data`` in its place. Raises what the gate raises."""
        ...


class VolumeAccount:
    """See `AccountPlace`.

    Args:
        gate: asked right before the file is replaced; see `Authority`.
    """

    def __init__(self, run: RunDirectory, gate: Callable[[], None]) -> None:
        self._path = run.account
        self._gate = gate
        self.name = str(run.account)

    def read(self) -> bytes | None:
        """See `AccountPlace`."""
        try:
            return records.read_regular(self._path)
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        """See `AccountPlace`."""
        atomic.make_directory(self._path.parent)
        atomic.write_bytes(self._path, data, self._gate, durably=False)


class StoredAccount:
    """See `AccountPlace`. An object that another monitor has put since it was read is not replaced
    unseen: that write fails, and the next one replaces it.

    Args:
        gate: asked right before the object is put; see `Authority`.
    """

    def __init__(self, bucket: ObjectBucket, gate: Callable[[], None]) -> None:
        self._bucket = bucket
        self._gate = gate
        self._there: Blob | None = None
        self.name = f"{bucket.name}/{names.ACCOUNT}"

    def read(self) -> bytes | None:
        """See `AccountPlace`."""
        self._there = self._bucket.find(names.ACCOUNT)
        return None if self._there is None else self._there.data

    def write(self, data: bytes) -> None:
        """See `AccountPlace`.

        Raises:
            ObjectExistsError, ObjectChangedError: another monitor has put one since.
        """
        self._gate()
        try:
            if self._there is None:
                self._bucket.create(names.ACCOUNT, data)
            else:
                self._bucket.replace(names.ACCOUNT, data, self._there)
        except (ObjectExistsError, ObjectChangedError):
            self.read()
            raise
        self.read()
