"""Which process writes a participant's part of a save: one, and a second one is told of the first.

Each writer holds a lock on a file of its own for as long as its process lives, so that others can
tell a writer that was started anew, whose place is free, from a second one beside it. Beside the
locks there is a record for each participant: which process wrote which of the last steps.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import socket
import threading
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, locks
from trainsync.storage.errors import DamagedFileError, SecondWriterError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import Count, Incarnation, Participant

_LOG = logging.getLogger(__name__)
_LOCK_SECONDS: Final = 30.0
_STEPS_KEPT: Final = 64
_LARGEST: Final = 1 << 20
_TAKEN: Final = frozenset({errno.EACCES, errno.EAGAIN})

# Process of each writer made here: to open its lock's file once more would let go of the lock.
_MADE_HERE: dict[str, int] = {}


@dataclass(frozen=True)
class _Mark:
    """``writer`` wrote ``step``, or wanted to; ``first`` had written it before."""

    step: Count
    writer: Incarnation
    first: Incarnation | None = None


@dataclass(frozen=True)
class _Record:
    """The process that wrote the last steps of a participant.

    ``processes`` says for people where each writer runs; ``dead`` are those whose place was taken;
    ``second`` is the newest second writer of which the first was not told yet.
    """

    steps: tuple[_Mark, ...] = ()
    processes: dict[Incarnation, str] = field(default_factory=dict)
    dead: tuple[Incarnation, ...] = ()
    second: _Mark | None = None

    def writer_of(self, step: int) -> str | None:
        return next((mark.writer for mark in self.steps if mark.step == step), None)

    def is_forgotten(self, step: int) -> bool:
        """Whether the step is so old that its writer is not known any more."""
        full = len(self.steps) >= _STEPS_KEPT
        return full and all(step < mark.step for mark in self.steps)


_RECORD: Final = TypeAdapter(_Record)


class Writer:
    """One coordinator of this process, as a writer of one incarnation's saves. Thread-safe.

    Args:
        continues: a writer of a process that has died, whose parts this one finishes in its name.
            It stays dead for others: a process that is started anew takes its place, at any time.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, incarnation: str, continues: str | None = None
    ) -> None:
        self.id: Final = continues or secrets.token_hex(8)
        self._run = run
        self._attempt = attempt
        self._incarnation = incarnation
        self._directory = run.writers(attempt, incarnation)
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._lock = threading.Lock()  # guards `_has_lock`
        self._has_lock = continues is not None  # the lock of the writer's file; or needs none

    def claim(self, kind: SaveKind, step: int, participant: Participant) -> tuple[str, ...]:
        """Be the one that writes the participant's part of the save; to be asked again before the
        receipt.

        Returns:
            Writers of the participant that are dead, whose place this one has taken.

        Raises:
            SecondWriterError: another one that lives writes it, or has written it, or has done so
                at an earlier step. That one hears the same when it writes next.
            LockTimeoutError, OSError: the volume.
        """
        self._hold_lock()
        path = self._directory / f"{kind.value}.{participant}.json"
        with locks.opened(path, _LOCK_SECONDS) as (fd, _):
            record = _read(fd)
            try:
                after = self._claimed(record, kind, step, participant)
            except _RefusedError as refused:
                _write(fd, refused.record)
                raise refused.error from None
            if after != record:
                _write(fd, after)
        return after.dead

    def _claimed(
        self, record: _Record, kind: SaveKind, step: int, participant: Participant
    ) -> _Record:
        what = f"{participant} of {kind.value} "
        second = record.second
        if second is not None and second.first == self.id:
            record = replace(record, second=None)
            # Of a save that was aborted for it this process hears anyway.
            if second.step == step or not self._was_aborted(kind, second.step):
                raise self._refused(record, f"{what}{second.step}", second.writer)
        writer = record.writer_of(step)
        if writer == self.id:
            return record
        if self.id in record.dead:
            other = writer or record.steps[-1].writer
            raise self._refused(record, f"{what}{step}", other, "; this one was taken for dead")
        if writer is None and record.is_forgotten(step):
            writer = record.steps[-1].writer
        dead = record.dead
        if writer is not None:
            if self._is_alive(writer):
                record = replace(record, second=_Mark(step, self.id, writer))
                raise self._refused(self._known(record), f"{what}{step}", writer)
            dead = (*(other for other in dead if other != writer), writer)
        kept = tuple(mark for mark in record.steps if mark.step != step)
        steps = (*kept, _Mark(step, self.id))[-_STEPS_KEPT:]
        return self._known(replace(record, steps=steps, dead=dead))

    def _known(self, record: _Record) -> _Record:
        """``record`` with this writer's process, and without writers that are not named."""
        named = {mark.writer for mark in record.steps} | {self.id}
        if record.second is not None:
            named.add(record.second.writer)
        processes = {**record.processes, self.id: self._process}
        return replace(
            record,
            processes={
                participant: where
                for participant, where in processes.items()
                if participant in named
            },
        )

    def _refused(self, record: _Record, what: str, other: str, more: str = "") -> "_RefusedError":
        where = record.processes.get(other, "a process")
        if where == self._process:
            text = (
                f"{what} is written by two coordinators of {where} (writers {other} and "
                f"{self.id}){more}; expected one: let all that save it share a coordinator"
            )
        else:
            text = (
                f"{what} is written by two processes: {where} (writer {other}) and "
                f"{self._process} (writer {self.id}){more}; expected one process for each "
                "component and rank: give each its own rank= and world_size="
            )
        return _RefusedError(record, SecondWriterError(text))

    def _was_aborted(self, kind: SaveKind, step: int) -> bool:
        save = self._run.save(self._attempt, self._incarnation, kind, step)
        with contextlib.suppress(OSError, DamagedFileError):
            outcome = receipts.read_outcome(save)
            return outcome is not None and outcome.error is not None
        return False

    def _is_alive(self, writer: str) -> bool:
        """Whether it may be: on a volume without locks that is not known."""
        if _MADE_HERE.get(writer) == os.getpid():
            return True
        try:
            fd = os.open(self._place(writer), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may ask as well
        except OSError as error:
            if error.errno not in _TAKEN:
                _LOG.warning("%s: whether it lives cannot be told: %s", writer, error)
            return True
        finally:
            os.close(fd)
        return False

    def _hold_lock(self) -> None:
        with self._lock:
            if self._has_lock:
                return
            atomic.make_directory(self._directory)
            path = self._place(self.id)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(path, flags, atomic.FILE_MODE)
            try:
                os.fchmod(fd, atomic.FILE_MODE)
                # Not flock: a process forked from this one would hold it, too.
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # The others then take it for alive, which is safe.
                _LOG.warning("%s: this volume has no file locks: %s", path, error)
            _MADE_HERE[self.id] = os.getpid()
            # Released by the system when the process ends; at interpreter exit threads may
            # still write.
            weakref.finalize(self, _let_go, self.id, fd).atexit = False
            self._has_lock = True

    def _place(self, writer: str) -> Path:
        return self._directory / f"{writer}.lock"


class _RefusedError(Exception):
    """The message to record and to raise."""

    def __init__(self, record: _Record, error: SecondWriterError) -> None:
        super().__init__(str(error))
        self.record = record
        self.error = error


def _let_go(writer: str, fd: int) -> None:
    os.close(fd)
    _MADE_HERE.pop(writer, None)


def _read(fd: int) -> _Record:
    data = os.pread(fd, _LARGEST, 0)
    try:
        return _RECORD.validate_json(data) if data else _Record()
    except ValueError:
        return _Record()  # torn by a crash of the machine


def _write(fd: int, record: _Record) -> None:
    data = _RECORD.dump_json(record, exclude_none=True) + b"\n"
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
