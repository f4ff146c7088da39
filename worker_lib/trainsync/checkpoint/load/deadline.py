"""The deadline of a read, and the files of a store that are read by it. Needs no torch."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from trainsync.checkpoint.errors import LoadTimeoutError
from trainsync.checkpoint.load.stored import StoredFiles
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.saves.receipts import FileEntry


def in_time(what: str, deadline: float) -> None:
    """Raises `LoadTimeoutError` once the deadline, by `time.monotonic`, has passed."""
    if time.monotonic() > deadline:
        raise LoadTimeoutError(f"{what} could not be read in time")


@dataclass(frozen=True)
class FilesInTime(StoredFiles):
    """Raises `LoadTimeoutError` where more is asked for after the deadline; each request has one of
    its own besides.

    Attributes:
        what: the step, for messages.
        deadline: by `time.monotonic`.
        bucket: the store, where this process has it open already.
    """

    what: str
    deadline: float
    bucket: ObjectBucket | None = field(default=None, repr=False, compare=False)

    @classmethod
    def by(
        cls, files: StoredFiles, what: str, deadline: float, bucket: ObjectBucket | None = None
    ) -> Self:
        """The same ``files``; see the attributes."""
        return cls(files.url, files.keys, what, deadline, bucket, bases=files.bases)

    def blocks(self, entry: FileEntry) -> Iterator[bytes]:
        """See `StoredFiles`."""
        for block in super().blocks(entry):
            in_time(self.what, self.deadline)
            yield block

    def range(self, entry: FileEntry, start: int, end: int) -> memoryview:
        """See `StoredFiles`."""
        in_time(self.what, self.deadline)
        return super().range(entry, start, end)

    def _store(self) -> ObjectBucket:
        return self.bucket or super()._store()
