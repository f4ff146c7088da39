"""Reads many files at once and compares their digests."""

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainsync.storage.digest import drop_cached, file_digest
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.inspect.findings import Code
from trainsync.storage.layout import inside
from trainsync.storage.parallel import for_each
from trainsync.storage.saves.receipts import FileEntry

Problem = tuple[Code, str]

_LOG = logging.getLogger(__name__)
_TELL_EVERY: Final = 64 << 20
# One bad file. Anything else (ESTALE, ENOTCONN, EACCES …) says that the volume or we are at fault,
# and that nothing can be said of the file.
_OF_THE_FILE: Final = (errno.EIO, errno.EUCLEAN, errno.ELOOP)


@dataclass(frozen=True)
class ExpectedFile:
    """A file below ``base`` and what its bytes must be."""

    base: Path
    entry: FileEntry


class ReadingStoppedError(Exception):
    """Raised by a listener of a reading that wants no more of it."""


def read_all(
    readings: Sequence[ExpectedFile], *, threads: int, on_bytes: Callable[[int], None]
) -> dict[ExpectedFile, Problem]:
    """Read every file; what is wrong with each that is not as it must be.

    One whose bytes differ is read once more, without the page cache: they may differ in this
    host's memory alone.

    Args:
        on_bytes: told how many more bytes were read, from several threads; what it raises ends the
            reading.

    Raises:
        OSError: the volume cannot be read; reading stops.
        ValueError: no thread at all.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}, expected at least 1")
    problems: dict[ExpectedFile, Problem] = {}

    def read(reading: ExpectedFile, go_on: Callable[[], None]) -> None:
        problem = _read(reading, go_on, on_bytes)
        if problem is not None:
            problems[reading] = problem

    # The largest first, so that no thread is left alone with one at the end.
    largest_first = sorted(readings, key=lambda reading: -reading.entry.bytes)
    for_each(largest_first, read, threads, "verify")
    return problems


def _read(
    reading: ExpectedFile, go_on: Callable[[], None], on_bytes: Callable[[int], None]
) -> Problem | None:
    untold = 0

    def on_block(count: int) -> None:
        nonlocal untold
        go_on()
        untold += count
        if untold >= _TELL_EVERY:
            on_bytes(untold)
            untold = 0

    def on_block_again(_count: int) -> None:
        on_block(0)
        on_bytes(0)  # its bytes are told already; the listener may stop the reading

    expected = reading.entry.digest
    try:
        path = inside(reading.base, reading.entry.path)
        found = file_digest(path, on_block)
        if found != expected:
            drop_cached(path)
            if file_digest(path, on_block_again) == expected:
                _LOG.error("%s differed when it was read first, and not the second time", path)
                found = expected
    except FileNotFoundError:
        return Code.MISSING, "went away while it was read"
    except UnsafePathError as error:
        return Code.NOT_A_FILE, f"is refused: {error}"
    except OSError as error:
        if error.errno not in _OF_THE_FILE:
            raise
        return Code.UNREADABLE, f"cannot be read: {error.strerror}"
    on_bytes(untold)
    if found != expected:
        return Code.DIGEST, f"has digest {found}, expected {expected}"
    return None
