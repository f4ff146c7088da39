"""The faults themselves, built into a process before it starts."""

import ctypes
import errno
import io
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH: Final = 2


class At:
    """A hook that strikes once: at the n-th time that ``phase`` comes while it is armed.

    Args:
        strike: what happens then, in the thread that is there.
    """

    def __init__(self, phase: str, nth: int, strike: Callable[[], None]) -> None:
        self._phase = phase
        self._left = nth
        self._strike = strike
        self._lock = threading.Lock()
        self.armed = False

    def __call__(self, phase: str) -> None:
        """To be given to ``WriteHooks`` or ``Hooks``."""
        with self._lock:
            if not self.armed or phase != self._phase:
                return
            self._left -= 1
            strikes = self._left == 0
        if strikes:
            self._strike()


def kill_me() -> None:
    """As the kernel's memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_me() -> None:
    """As a machine does that hangs for a while."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Slow:
    """A hook that takes up to ``longest`` seconds each time."""

    def __init__(self, seed: int, longest: float) -> None:
        self._dice = random.Random(f"slow {seed}")
        self._longest = longest
        self.armed = False

    def __call__(self, phase: str) -> None:
        """To be given to ``WriteHooks`` or ``Hooks``."""
        if self.armed:
            time.sleep(self._dice.random() * self._longest)


class FaultyDisk:
    """Makes calls of this process to the disk fail with EIO, as a dying disk does.

    The fault cannot be made for real without a device of one's own, so Python's way to the system
    calls is changed, for this process. Calls are counted always, and fail only once `arm` was
    called. Only paths and files below ``root`` count.
    """

    OPERATIONS: Final = ("write", "fsync", "rename", "open", "mkdir")

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._lock = threading.Lock()
        self._strike_at: int | None = None
        self._times = 0
        self.calls = 0
        self.struck = 0

    def install(self) -> None:
        """Change this process for good."""
        replaced = {
            "write": ("write", "writev", "pwrite"),
            "fsync": ("fsync", "fdatasync"),
            "rename": ("rename", "replace", "link"),
            "open": ("open",),
            "mkdir": ("mkdir",),
        }
        for name in replaced[self._operation]:
            setattr(os, name, self._guarded(getattr(os, name)))
        if self._operation == "write":
            disk = self

            class File(io.FileIO):
                def write(self, data: Any) -> int:
                    disk.count()
                    return super().write(data)

            def fdopen(fd: int, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
                raw = File(fd, mode.replace("b", ""))
                size = buffering if buffering > 0 else io.DEFAULT_BUFFER_SIZE
                return raw if buffering == 0 else io.BufferedWriter(raw, size)

            real = os.fdopen
            os.fdopen = lambda fd, mode="r", *args, **more: (  # type: ignore[assignment]
                fdopen(fd, mode, *args, **more)
                if "w" in mode and "b" in mode
                else real(fd, mode, *args, **more)
            )

    def arm(self, nth: int, times: int) -> None:
        """Fail the ``nth`` call from now on and the ``times`` - 1 after it."""
        with self._lock:
            self._strike_at = self.calls + nth
            self._times = times

    def heal(self) -> None:
        """Fail no more."""
        with self._lock:
            self._strike_at = None

    def count(self) -> None:
        """One call. Raises `OSError` when it is to fail."""
        with self._lock:
            self.calls += 1
            first = self._strike_at
            fails = first is not None and first <= self.calls < first + self._times
            self.struck += fails
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **more: Any) -> Any:
            self.count()
            return real(*args, **more)

        return guarded


@contextmanager
def small_volume(directory: Path, size: int, inodes: int) -> Iterator[None]:
    """A file system of its own at ``directory``; root only. Sizes in bytes and files."""
    options = f"size={size},nr_inodes={inodes}".encode()
    _check(_LIBC.mount(b"none", bytes(directory), b"tmpfs", 0, options), directory)
    try:
        yield
    finally:
        _check(_LIBC.umount2(bytes(directory), _MNT_DETACH), directory)


class Ballast:
    """Fills a volume, but for so much."""

    def __init__(self, volume: Path) -> None:
        self._directory = volume / ".ballast"

    def fill(self, spare_bytes: int, spare_files: int) -> None:
        """Leave ``spare_bytes`` (in whole pages) and ``spare_files`` to be made."""
        self._directory.mkdir()
        space = os.statvfs(self._directory)
        pages = space.f_bavail - spare_bytes // space.f_frsize
        with (self._directory / "bytes").open("wb", buffering=0) as file:
            for _ in range(max(pages, 0)):
                file.write(b"\0" * space.f_frsize)
        for number in range(max(os.statvfs(self._directory).f_favail - spare_files, 0)):
            (self._directory / f"file-{number}").touch()

    def empty(self) -> None:
        """Give it all back."""
        for entry in self._directory.iterdir():
            entry.unlink()
        self._directory.rmdir()


def _check(result: int, path: Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
