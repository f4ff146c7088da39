"""Faults that are built into a process before it starts."""

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH: Final = 2


class At:
    """A handler that strikes once: at the n-th time that ``phase`` comes while it is armed.

    Args:
        strike: called in the thread that reached the phase.
    """

    def __init__(self, phase: str, nth: int, strike: Callable[[], None]) -> None:
        self._phase = phase
        self._left = nth
        self._strike = strike
        self._lock = threading.Lock()
        self.armed = False

    def __call__(self, phase: str) -> None:
        """To be given to `trainsync.failpoints.enable`."""
        with self._lock:
            if not self.armed or phase != self._phase:
                return
            self._left -= 1
            strikes = self._left == 0
        if strikes:
            self._strike()


def kill_me() -> None:
    """SIGKILL this process, like the kernel's OOM killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_me() -> None:
    """SIGSTOP this process, like a machine that hangs for a while."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Slow:
    """A handler that takes up to ``longest`` seconds each time."""

    def __init__(self, seed: int, longest: float) -> None:
        self._dice = random.Random(f"slow {seed}")
        self._longest = longest
        self.armed = False

    def __call__(self, phase: str) -> None:
        """To be given to `trainsync.failpoints.enable`."""
        if self.armed:
            time.sleep(self._dice.random() * self._longest)


@contextmanager
def small_volume(directory: Path, size: int, inodes: int) -> Iterator[None]:
    """A separate file system at ``directory``; root only. Sizes in bytes and files."""
    options = f"size={size},nr_inodes={inodes}".encode()
    _check(_LIBC.mount(b"none", bytes(directory), b"tmpfs", 0, options), directory)
    try:
        yield
    finally:
        _check(_LIBC.umount2(bytes(directory), _MNT_DETACH), directory)


class Ballast:
    """Fills a volume except for a given rest."""

    def __init__(self, volume: Path) -> None:
        self._directory = volume / ".ballast"

    def fill(self, spare_bytes: int, spare_files: int) -> None:
        """Leave ``spare_bytes`` (in whole pages) and ``spare_files`` free."""
        self._directory.mkdir()
        space = os.statvfs(self._directory)
        pages = space.f_bavail - spare_bytes // space.f_frsize
        with (self._directory / "bytes").open("wb", buffering=0) as file:
            for _ in range(max(pages, 0)):
                file.write(b"\0" * space.f_frsize)
        for number in range(max(os.statvfs(self._directory).f_favail - spare_files, 0)):
            (self._directory / f"file-{number}").touch()

    def empty(self) -> None:
        """Remove the ballast."""
        for entry in self._directory.iterdir():
            entry.unlink()
        self._directory.rmdir()


def _check(result: int, path: Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
