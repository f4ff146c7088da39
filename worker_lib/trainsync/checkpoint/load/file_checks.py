"""Compare files of a committed step with its manifest, while the caller does something else."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.storage.errors import FileCheckError
from trainsync.storage.inspect import digests
from trainsync.storage.saves.manifest import check_file
from trainsync.storage.saves.receipts import FileEntry

_THREADS: Final = 2  # of reading: one thread alone waits for a volume across a network


class FileChecks:
    """A context in which files are read to the last bit. It is left when all of them are checked.

    Data read inside the context is valid once the context was left without an error. When the
    caller fails with anything but an `OSError`, the files are checked first: damage is then the
    cause, and is raised instead.

    Args:
        directory: of the step.
        files: as the manifest has them.
        on_bytes: called with the number of bytes that were read since, from several threads.

    Raises:
        CorruptCheckpointError: a file is missing, cut short or differs; sizes are compared at
            once, digests when the context is left.
        OSError: the volume cannot be read.
    """

    def __init__(
        self, directory: Path, files: Iterable[FileEntry], on_bytes: Callable[[int], None]
    ) -> None:
        self._directory = directory
        self._on_bytes = on_bytes
        self._stop = threading.Event()
        self._readings = [digests.ExpectedFile(directory, entry) for entry in files]
        try:
            for reading in self._readings:
                check_file(directory, reading.entry, with_digest=False)
        except (FileCheckError, FileNotFoundError) as error:
            raise CorruptCheckpointError(str(error)) from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainsync-file-checks")

    def __enter__(self) -> Self:
        self._found = self._pool.submit(
            digests.read_all, self._readings, threads=_THREADS, on_bytes=self._tell
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        wanted = error is None or (isinstance(error, Exception) and not isinstance(error, OSError))
        try:
            if wanted:
                self._raise_damage()
        finally:  # also on Ctrl-C
            self._stop.set()
            self._pool.shutdown()

    def _raise_damage(self) -> None:
        for reading, (_, sentence) in self._found.result().items():
            raise CorruptCheckpointError(f"{self._directory / reading.entry.path} {sentence}")

    def _tell(self, count: int) -> None:
        if self._stop.is_set():
            raise digests.ReadingStoppedError("the context was left before all files were read")
        self._on_bytes(count)
