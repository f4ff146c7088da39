"""Reads committed saves to the last bit, one at a time, in threads of its own."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainsync.monitor.errors import StorageUnavailableError, VerifyingError
from trainsync.storage.errors import StorageError
from trainsync.storage.inspect.digests import ReadingStoppedError
from trainsync.storage.inspect.findings import Code
from trainsync.storage.inspect.saves import InspectedSave, check_digests
from trainsync.storage.layout import RunDirectory, step_name
from trainsync.storage.saves.manifest import Committed
from trainsync.storage.saves.receipts import FileEntry

_LOG = logging.getLogger(__name__)
_THREADS: Final = min(8, os.cpu_count() or 1)
_SHOWN: Final = 3
_TELL_SECONDS: Final = 10.0
_AGAIN_SECONDS: Final = 60.0  # so long an answer of the volume's counts, before it is asked again


@dataclass(frozen=True)
class FileDamage:
    """A difference: a sentence, and the manifest's entries that are not true any more."""

    text: str
    files: frozenset[FileEntry]


@dataclass(frozen=True)
class _Verdict:
    """``wrong`` is what differs; ``unreadable`` why nothing can be said, until ``expires``."""

    wrong: FileDamage | None = None
    unreadable: str | None = None
    expires: float = 0.0


class DigestReader:
    """Owned by the core's thread, which never waits for it; `stop` may be called by any.

    Args:
        monotonic: seconds that only ever go on.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        threads: int = _THREADS,
    ) -> None:
        self._run = run
        self._monotonic = monotonic
        self._threads = threads
        self._verdicts: dict[str, _Verdict] = {}  # by the digest of the manifest
        self._running: _Reading | None = None
        self._stopped = threading.Event()

    def verdict(self, committed: Committed) -> FileDamage | None:
        """The difference of the save's files from the manifest; None when they match.

        A file counts as wrong when it was read twice, the second time without the page cache.

        Raises:
            VerifyingError: they are being read; says how far.
            StorageUnavailableError: they could not be read; asked a minute later it reads again.
        """
        self.collect()
        known = self._verdicts.get(committed.digest)
        if known is not None and known.unreadable is None:
            return known.wrong
        if known is not None and self._monotonic() < known.expires:
            raise StorageUnavailableError(known.unreadable)
        if self._running is None:
            self._running = _Reading(self._run, committed, self._threads, self._stopped)
        raise VerifyingError(self._running.progress())

    def collect(self) -> bool:
        """Take what was found since the last call; whether there was something."""
        running = self._running
        if running is None or running.is_alive:
            return False
        self._running = None
        expires = self._monotonic() + _AGAIN_SECONDS
        self._verdicts[running.digest] = _Verdict(running.wrong, running.unreadable, expires)
        return True

    def forget(self, digest: str | None = None) -> None:
        """Read that save again, or all of them, when asked again."""
        if digest is None:
            self._verdicts.clear()
        else:
            self._verdicts.pop(digest, None)

    @property
    def busy(self) -> bool:
        """Whether a save is being read, or was and `collect` has not taken what was found."""
        return self._running is not None

    @property
    def progress(self) -> str | None:
        """The progress of the reading; None when nothing is being read."""
        return None if self._running is None else self._running.progress()

    def stop(self) -> None:
        """Read no further, and nothing else."""
        self._stopped.set()


class _Reading:
    """One save that is being read."""

    def __init__(
        self, run: RunDirectory, committed: Committed, threads: int, stopped: threading.Event
    ) -> None:
        self.wrong: FileDamage | None = None
        self.unreadable: str | None = None
        self.digest = committed.digest
        self._run = run
        self._name = f"{committed.manifest.kind} {committed.manifest.step}"
        self._save = InspectedSave(committed.manifest.step, committed.manifest.kind, committed)
        self._total = committed.manifest.bytes
        self._threads = threads
        self._started = time.monotonic()
        self._told = self._started
        self._read = 0
        self._lock = threading.Lock()  # of what was read
        self._stopped = stopped
        # A daemon: a process that ends does not wait for what it does not want to know any more.
        self._thread = threading.Thread(
            target=self._run_thread, name=f"verify-{committed.manifest.step}", daemon=True
        )
        _LOG.info("%s is read to the last bit: %d bytes", self._name, self._total)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def progress(self) -> str:
        seconds = time.monotonic() - self._started
        return (
            f"{self._name} is read to the last bit: {self._read / 1e9:.1f} of "
            f"{self._total / 1e9:.1f} GB after {seconds:.0f} s"
        )

    def _run_thread(self) -> None:
        try:
            self._judge()
        except ReadingStoppedError:
            self.unreadable = f"{self._name} was not read to its end: this monitor ends"
            _LOG.info("%s", self.unreadable)
            return
        except Exception as error:  # noqa: BLE001 - told to the next request
            if not isinstance(error, (OSError, StorageError)):
                _LOG.exception("%s: reading it failed", self._name)
            self.unreadable = f"{self._name} cannot be read: {type(error).__name__}: {error}"
        seconds = time.monotonic() - self._started
        wrong = None if self.wrong is None else self.wrong.text
        found = wrong or self.unreadable or "as its manifest says"
        level = logging.INFO if found.startswith("as") else logging.ERROR
        _LOG.log(level, "%s: %d bytes in %.1f s: %s", self._name, self._read, seconds, found)

    def _judge(self) -> None:
        checked = check_digests(
            self._run, [self._save], threads=self._threads, on_bytes=self._on_bytes
        )
        findings = checked[0].findings if checked else ()
        wrong = [found for found in findings if found.code is Code.DIGEST]
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            text = "; ".join(str(found) for found in wrong[:_SHOWN]) + more
            base, paths = step_name(self._save.step), {found.path for found in wrong}
            files = frozenset(e for e in self._save.files if f"{base}/{e.path}" in paths)
            self.wrong = FileDamage(text, files)
            return
        # A disk that fails, or a file that comes and goes: of such the bytes say nothing.
        others = [found for found in findings if found.code is not Code.DIGEST]
        if others or not checked:
            why = str(others[0]) if others else "the checkpoint is gone"
            self.unreadable = f"{self._name} cannot be read: {why}"

    def _on_bytes(self, count: int) -> None:
        self._check_stopped(count)
        with self._lock:
            self._read += count
            now = time.monotonic()
            if now - self._told < _TELL_SECONDS:
                return
            self._told = now
        _LOG.info("%s", self.progress())

    def _check_stopped(self, _count: int) -> None:
        if self._stopped.is_set():
            raise ReadingStoppedError
