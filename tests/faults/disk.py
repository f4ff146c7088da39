"""Names and counts each call by which a process changes the disk, and injects a fault at one call.

Python's functions for system calls are patched in this process: without a special device there is
no other way to fail one rename of many. Only calls in the run's directory count.
"""

import errno
import io
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from trainsync.storage.saves import superseding

from tests.faults.inject import kill_me

_WRITE: Final = os.write
_ALLOCATES: Final = frozenset({"open", "write", "mkdir", "link", "rename", "exchange", "fsync"})
"""Calls that a full disk refuses (also a sync: some file systems allocate at that time)."""

_RANDOM: Final = (
    (re.compile(r"\.([^/]+)\.[0-9a-f]{8}\.tmp"), r"\1.tmp"),
    (re.compile(r"(trash/[^/]+)\.[0-9a-f]{8}"), r"\1"),
    (re.compile(r"([0-9]+)-incarnation[a-z0-9]+"), r"attempt \1"),
)
"""Random parts of names, different in each run."""


class Act(NamedTuple):
    """A call, with the same name in every run of the job: the ``nth`` ``operation`` at
    ``place``."""

    operation: str
    place: str
    nth: int

    def __str__(self) -> str:
        return f"{self.operation} {self.place} #{self.nth}"


class How(StrEnum):
    """The kind of fault at the chosen call."""

    KILLED_BEFORE = "killed_before"
    """kill -9 before the call; a write writes half of its bytes first."""
    KILLED_AFTER = "killed_after"
    EIO_ONCE = "eio_once"
    EIO_LASTING = "eio_lasting"
    """EIO at this call and all later ones."""
    ENOSPC_ONCE = "enospc_once"
    ENOSPC_LASTING = "enospc_lasting"
    """ENOSPC at this call and all later ones that need space."""

    @property
    def kills(self) -> bool:
        """Whether the fault kills the process."""
        return self in (How.KILLED_BEFORE, How.KILLED_AFTER)

    @property
    def lasts(self) -> bool:
        """Whether later calls fail too."""
        return self in (How.EIO_LASTING, How.ENOSPC_LASTING)

    @property
    def number(self) -> int:
        """The errno of a fault that does not kill."""
        return errno.EIO if self in (How.EIO_ONCE, How.EIO_LASTING) else errno.ENOSPC

    def may_strike(self, act: Act) -> bool:
        """Whether the fault can happen at this call."""
        return self.kills or self.number == errno.EIO or act.operation in _ALLOCATES


@dataclass(frozen=True)
class Strike:
    """Injects ``how`` at ``act``; a lasting error ends after ``seconds``."""

    how: How
    act: Act
    seconds: float = 0.0


class Disk:
    """Records all calls of this process after `install`, and injects a fault at one."""

    def __init__(self, root: Path, strike: Strike | None = None) -> None:
        self._root = root.resolve()
        self._strike = strike
        self._lock = threading.RLock()  # reentrant: a finalizer may call this
        self._counts: Counter[tuple[str, str]] = Counter()
        self._fails_until = 0.0
        self.acts: list[Act] = []
        self.struck = False

    def heal(self) -> None:
        """End a lasting fault."""
        with self._lock:
            self._fails_until, self._strike = 0.0, None

    def install(self) -> None:
        """Patch this process permanently."""
        for name in ("mkdir", "rmdir", "unlink", "remove", "chmod"):
            self._replace(name, "unlink" if name == "remove" else name)
        for name in ("rename", "replace", "link"):
            self._replace_pair(name, "link" if name == "link" else "rename")
        for name in ("fsync", "fdatasync", "ftruncate", "fchmod"):
            self._replace(name, "fsync" if name == "fdatasync" else name)
        for name in ("write", "writev", "pwrite"):
            self._replace_write(name)
        self._replace_open()
        self._replace_fdopen()
        exchange = superseding.exchange

        def exchanged(first: Path, second: Path) -> bool:
            place = self._pair(str(first), str(second))
            return bool(self._do("exchange", place, lambda: exchange(first, second)))

        superseding.exchange = exchanged

    # -- names ------------------------------------------------------------------------------

    def _place(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path relative to the run's directory; None for a path outside."""
        if isinstance(path, int):
            whole = _opened(path)
        else:
            whole = (_opened(dir_fd) if dir_fd is not None else Path.cwd()) / os.fsdecode(path)
        if not whole.is_relative_to(self._root):
            return None
        place = str(whole.relative_to(self._root))
        for pattern, name in _RANDOM:
            place = pattern.sub(name, place)
        return place

    def _pair(self, source: Any, target: Any) -> str | None:
        first, second = self._place(source), self._place(target)
        if first is None or second is None:
            return None
        return second if first == f"{second}.tmp" else f"{first} to {second}"

    # -- calls ------------------------------------------------------------------------------

    def _do(
        self,
        operation: str,
        place: str | None,
        call: Callable[[], Any],
        half: Callable[[], Any] = lambda: None,
    ) -> Any:
        if place is None:
            return call()
        act, how = self._begin(operation, place)
        if how is How.KILLED_BEFORE:
            half()
            kill_me()
        elif how is not None and how is not How.KILLED_AFTER:
            raise OSError(how.number, os.strerror(how.number), act.place)
        result = call()
        if how is How.KILLED_AFTER:
            kill_me()
        return result

    def _begin(self, operation: str, place: str) -> tuple[Act, How | None]:
        """Record a call; returns the fault to inject, if any."""
        with self._lock:
            self._counts[operation, place] += 1
            act = Act(operation, place, self._counts[operation, place])
            self.acts.append(act)
            strike = self._strike
            if strike is None:
                return act, None
            if act == strike.act:
                self.struck = True
                self._fails_until = time.monotonic() + strike.seconds
                return act, strike.how
            fails = time.monotonic() < self._fails_until and strike.how.may_strike(act)
            return act, strike.how if fails else None

    def _replace(self, name: str, operation: str) -> None:
        real = getattr(os, name)

        def call(path: Any, *more: Any, **named: Any) -> Any:
            place = self._place(path, named.get("dir_fd"))
            return self._do(operation, place, lambda: real(path, *more, **named))

        setattr(os, name, call)

    def _replace_pair(self, name: str, operation: str) -> None:
        real = getattr(os, name)

        def call(source: Any, target: Any, **named: Any) -> Any:
            place = self._pair(source, target)
            return self._do(operation, place, lambda: real(source, target, **named))

        setattr(os, name, call)

    def _replace_write(self, name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, data: Any, *more: Any) -> Any:
            def half() -> None:
                whole = b"".join(data) if name == "writev" else bytes(data)
                _WRITE(fd, whole[: len(whole) // 2])

            return self._do("write", self._place(fd), lambda: real(fd, data, *more), half)

        setattr(os, name, call)

    def _replace_open(self) -> None:
        real = os.open

        def call(path: Any, flags: int, *more: Any, **named: Any) -> int:
            changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            place = self._place(path, named.get("dir_fd")) if changes else None
            return int(self._do("open", place, lambda: real(path, flags, *more, **named)))

        os.open = call

    def _replace_fdopen(self) -> None:
        real, disk = os.fdopen, self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                def whole() -> int:
                    return io.FileIO.write(self, data)

                def half() -> None:
                    io.FileIO.write(self, bytes(data)[: len(data) // 2])

                return int(disk._do("write", disk._place(self.fileno()), whole, half))

        def call(fd: int, mode: str = "r", *more: Any, **named: Any) -> Any:
            if "w" in mode and "b" in mode:
                return io.BufferedWriter(File(fd, mode.replace("b", "")))
            return real(fd, mode, *more, **named)

        os.fdopen = call


def _opened(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()
