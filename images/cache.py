"""A cache outside the checkout, with keys made from the content of the inputs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/trainsync`` or ``~/.cache/trainsync``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "trainsync"


def key_of(*parts: str | bytes) -> str:
    """Sixteen hex digits that change when any part changes (parts are separated unambiguously)."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return ``path``; if it is missing, let ``make`` fill a temporary sibling and rename that.

    A second process waits for the first. The remains of a killed process are removed by the next
    one. ``make`` gets a path that does not exist.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        if path.exists():
            return path
        temporary = path.with_name(f".{path.name}.making")
        remove(temporary)
        make(temporary)
        temporary.rename(path)
    return path


def remove(path: Path) -> None:
    """Delete a file or a tree if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file as a lock between processes; other processes wait."""
    with path.open("w") as file:
        # No deadline: every program that the holder runs has one, and the kernel frees the lock
        # when the holder dies.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
