"""Reader leases: a step is not removed while a reader holds it.

A lease is a file, ``.trainsync/leases/<kind>-<step>-<holder>-<token>.json``, which its holder
rewrites while it reads and removes when it is done. It ends by itself when it is no longer
rewritten. Two things make it safe:

- Readers take a lease, and retention chooses and renames steps, under one lock (flock): either
  the lease came first and the step stays, or the step went first and the reader hears so. Where
  the volume has no working flock, retention looks again after each rename and puts a step back
  whose lease appeared meanwhile: a reader may then miss files for that moment, which it hears as an
  error; it never reads anything wrong.
- No two clocks are compared. The remover of steps (`LeaseBook`) counts a lease's time from when
  it saw the file change last, by its own monotonic clock. Only a file that is seen for the first
  time is judged by its age, so that what a crash left cannot hold a step for more than an hour; for
  this alone the clocks of the hosts and of the volume are assumed to agree within half an hour.
"""

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, locks, records
from trainsync.storage.errors import (
    DamagedFileError,
    LeaseLostError,
    LockTimeoutError,
    StepGoneError,
    UnsafePathError,
)
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import Committed, read_manifest
from trainsync.storage.saves.receipts import Count

DEFAULT_TTL_SECONDS: Final = 120.0
LONGEST_TTL_SECONDS: Final = 3600.0
LOCK_SECONDS: Final = 30.0
"""Longest wait for the lock, which is only ever held for a few renames."""

_LOG = logging.getLogger(__name__)
_HOLDER = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
_NAME = re.compile(r"^(checkpoint|state_dict)-(0|[1-9][0-9]{0,15})-([A-Za-z0-9._-]{1,96})\.json$")


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """The record in a lease's file."""

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    kind: SaveKind
    step: Count
    holder: str
    host: str
    pid: Count
    ttl_seconds: Annotated[float, Field(gt=0, le=LONGEST_TTL_SECONDS)]
    version: Literal[1] = 1


@dataclass(frozen=True)
class HeldLease:
    """A lease in force, as `LeaseBook` sees it; ``holder`` is for people."""

    kind: SaveKind
    step: int
    holder: str


_RECORD = TypeAdapter(LeaseRecord)


def lock(run: RunDirectory, timeout: float, note: str) -> AbstractContextManager[locks.Lock]:
    """The lock between new readers and retention. Raises `LockTimeoutError`."""
    return locks.exclusive(run.leases.with_name("leases.lock"), timeout, note)


class ReaderLease:
    """A lease that is held; made by `reading`."""

    def __init__(
        self,
        run: RunDirectory,
        kind: SaveKind,
        step: int,
        holder: str,
        *,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        lock_seconds: float = LOCK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not _HOLDER.match(holder):
            raise UnsafePathError(
                f"{holder!r} cannot name a lease: expected 1 to 64 letters, digits, '.', '_', '-'"
            )
        self._run = run
        self._clock = clock
        self._lock_seconds = lock_seconds
        self._record = LeaseRecord(
            kind=kind,
            step=step,
            holder=holder,
            host=socket.gethostname(),
            pid=os.getpid(),
            ttl_seconds=min(ttl_seconds, LONGEST_TTL_SECONDS),
        )
        # With a token: two readers of one name must not end each other's lease.
        self.path = run.leases / f"{kind.value}-{step}-{holder}-{secrets.token_hex(4)}.json"
        self.committed = self._take()
        self._renewed = clock()
        self._lost: str | None = None

    def renew(self) -> None:
        """Rewrite the file, or take the lease anew if it is gone. Raises `OSError`.

        When that could not be done in time, and the step is gone or replaced, it is lost: `check`
        raises from then on.
        """
        if self._lost is None:
            try:
                if self.path.exists():
                    self._write()
                elif self._take().digest != self.committed.digest:
                    self._lost = "the step was replaced by another save"
            except (StepGoneError, LockTimeoutError) as error:
                self._lost = str(error)
                self.release()
            else:
                self._renewed = self._clock()

    def check(self) -> None:
        """See that the step was held without a gap until now.

        Raises:
            LeaseLostError: it was not.
        """
        if self._lost is None:
            late = self._clock() - self._renewed
            if late > self._record.ttl_seconds and not self.path.exists():
                self._lost = f"it was not renewed for {late:.0f} s"
            elif (why := self._changed()) is not None:
                self._lost = why
        if self._lost is not None:
            raise LeaseLostError(
                f"the lease on {self._record.kind.value} {self._record.step} in {self._run.root} "
                f"was lost while it was read: {self._lost}"
            )

    def release(self) -> None:
        """End it. Raises `OSError`; then it ends by itself."""
        self.path.unlink(missing_ok=True)

    def _changed(self) -> str | None:
        try:
            now = read_manifest(self._run, self._record.kind, self._record.step).digest
        except (FileNotFoundError, DamagedFileError) as error:
            return f"its manifest is gone or damaged: {error}"
        return None if now == self.committed.digest else "the step was replaced by another save"

    def _take(self) -> Committed:
        record = self._record
        with lock(self._run, self._lock_seconds, f"reader {record.holder} on {record.host}"):
            self._write()
            try:
                # After the lease, not before: nothing takes the step from here on.
                return read_manifest(self._run, record.kind, record.step)
            except FileNotFoundError:
                self.release()
                raise StepGoneError(
                    f"{record.kind.value} {record.step} is not committed in {self._run.root}: it "
                    "never was, or retention has removed it; choose a newer step"
                ) from None
            except BaseException:
                self.release()
                raise

    def _write(self) -> None:
        atomic.make_directory(self._run.leases)
        atomic.write_bytes(self.path, records.encode(_RECORD, self._record))


@contextmanager
def reading(
    run: RunDirectory,
    kind: SaveKind,
    step: int,
    holder: str,
    *,
    ttl_seconds: float = DEFAULT_TTL_SECONDS,
    lock_seconds: float = LOCK_SECONDS,
) -> Iterator[ReaderLease]:
    """Keep a committed step on the volume while the body reads it.

    The lease's ``committed`` is the manifest as it was when the lease was taken. A thread renews
    the lease; the end of the body sees that it was held all the time.

    Args:
        holder: the reader's name, for people: letters, digits, '.', '_', '-'.

    Raises:
        StepGoneError: the step is not committed, or not any more.
        LeaseLostError: at the end of a body that raised nothing: the step was removed or replaced
            while it was read.
        LockTimeoutError: another process holds the lock for too long.
        DamagedFileError: the manifest cannot be understood.
        OSError: the lease cannot be written, such as on a volume mounted read-only.
    """
    lease = ReaderLease(run, kind, step, holder, ttl_seconds=ttl_seconds, lock_seconds=lock_seconds)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(min(ttl_seconds, LONGEST_TTL_SECONDS) / 4):
            try:
                lease.renew()
            except OSError as error:
                _LOG.warning("%s was not renewed, and is tried again: %s", lease.path.name, error)

    thread = threading.Thread(target=renew, name=f"lease-{step}", daemon=True)
    thread.start()
    try:
        yield lease
        lease.check()
    finally:
        ended.set()
        thread.join()
        try:
            lease.release()
        except OSError as error:
            _LOG.warning("%s was not removed, and ends by itself: %s", lease.path.name, error)


@dataclass
class _SeenLease:
    lease: HeldLease
    stamp: tuple[int, int]
    ends: float


class LeaseBook:
    """Remembers the leases that one observer has seen on disk; see the module's docstring for time.

    Args:
        wall: seconds since 1970, for the age of files that are seen for the first time.
    """

    def __init__(self, run: RunDirectory, wall: Callable[[], float] = time.time) -> None:
        self._run = run
        self._wall = wall
        self._seen: dict[str, _SeenLease] = {}

    def in_force(self, now: float) -> list[HeldLease]:
        """Leases that hold a step now, by kind, step and holder. Raises `OSError`.

        Args:
            now: of a monotonic clock, always the same one.
        """
        self._look(now)
        held = [seen.lease for seen in self._seen.values() if now < seen.ends]
        return sorted(held, key=lambda lease: (lease.kind, lease.step, lease.holder))

    def steps(self, now: float) -> set[int]:
        """Steps that retention must leave. Raises `OSError`."""
        return {lease.step for lease in self.in_force(now)}

    def remove_expired(self, now: float, lock_seconds: float = LOCK_SECONDS) -> list[str]:
        """Remove the files of leases that ended without being released; their names.

        What a holder left that was killed amid a write goes, too.

        Raises:
            LockTimeoutError, OSError: try again later.
        """
        self._look(now)
        self._remove_temporaries()
        expired = [name for name, seen in self._seen.items() if now >= seen.ends]
        if not expired:
            return []
        removed = []
        with lock(self._run, lock_seconds, f"the monitor, process {os.getpid()}"):
            self._look(now)  # one may have been renewed meanwhile
            for name in expired:
                if name in self._seen and now >= self._seen[name].ends:
                    (self._run.leases / name).unlink(missing_ok=True)
                    del self._seen[name]
                    removed.append(name)
        return removed

    def _remove_temporaries(self) -> None:
        for path in self._run.leases.glob(".*"):
            try:
                young = self._wall() - path.lstat().st_mtime < LONGEST_TTL_SECONDS
                if atomic.is_temporary(path.name) and not young:
                    path.unlink()
            except FileNotFoundError:
                continue  # its holder was not dead

    def _look(self, now: float) -> None:
        present = {}
        for name, stamp, age in self._files():
            seen = self._seen.get(name)
            if seen is not None and seen.stamp == stamp:
                present[name] = seen
                continue
            lease, ttl = self._read(name)
            # A file from before this observer began: a crash may have left it long ago.
            stale = seen is None and age > LONGEST_TTL_SECONDS
            present[name] = _SeenLease(lease, stamp, now if stale else now + ttl)
        self._seen = present

    def _files(self) -> Iterator[tuple[str, tuple[int, int], float]]:
        try:
            entries = list(os.scandir(self._run.leases))
        except FileNotFoundError:
            return
        for entry in entries:
            if _NAME.match(entry.name) is None:
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # released meanwhile
            yield entry.name, (info.st_ino, info.st_mtime_ns), self._wall() - info.st_mtime

    def _read(self, name: str) -> tuple[HeldLease, float]:
        match = _NAME.match(name)
        assert match is not None
        # The name says what is held, so that a damaged lease still holds it for a while.
        lease = HeldLease(SaveKind(match[1]), int(match[2]), match[3])
        path: Path = self._run.leases / name
        try:
            return lease, records.read(_RECORD, path).ttl_seconds
        except FileNotFoundError:
            return lease, 0.0
        except DamagedFileError as error:
            _LOG.warning("a lease that cannot be read counts for a while: %s", error)
            return lease, DEFAULT_TTL_SECONDS
