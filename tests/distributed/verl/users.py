"""Processes with the users of a run on Kubernetes and the images' umask."""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from tests.distributed.processes.forked import CONTEXT

MONITOR: Final = 65532
"""User of the monitor, and group of all pods of a run."""
TRAINER: Final = 1234
SECONDS: Final = 120.0


@contextmanager
def place() -> Iterator[Path]:
    """A temporary directory that every user may enter.

    pytest's own directories are closed to others, again at every start of pytest by this user.
    """
    with tempfile.TemporaryDirectory(prefix="ts-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


def volume(directory: Path) -> Path:
    """A volume as mounted by the kubelet with the fsGroup."""
    root = directory / "volume"
    root.mkdir()
    os.chown(root, 0, MONITOR)
    root.chmod(0o2775)
    return root


class Process:
    """``function(connection, *arguments)`` as a user of the shared group, with umask 022."""

    def __init__(self, user: int, home: Path, function: Callable[..., Any], *arguments: Any):
        ours, theirs = CONTEXT.Pipe()
        self.connection = ours
        self._process = CONTEXT.Process(target=_act, args=(user, home, theirs, function, arguments))
        home.mkdir(exist_ok=True)
        os.chown(home, user, user)
        self._process.start()
        theirs.close()

    def hear(self, seconds: float = SECONDS) -> Any:
        """The process's next message; its traceback becomes an AssertionError."""
        assert self.connection.poll(seconds), f"nothing was heard within {seconds:g} s"
        value, error = self.connection.recv()
        assert error is None, error
        return value

    def tell(self, value: Any) -> None:
        """Send a value to the process's ``connection.recv``."""
        self.connection.send(value)

    def end(self) -> None:
        """Kill the process, if it has not ended."""
        self._process.kill()
        self._process.join(10)
        self.connection.close()


@contextmanager
def acting(
    user: int, home: Path, function: Callable[..., Any], *arguments: Any
) -> Iterator[Process]:
    """Context with a `Process` that ends with the block."""
    process = Process(user, home, function, *arguments)
    try:
        yield process
    finally:
        process.end()


def _act(
    user: int, home: Path, connection: Connection, function: Callable[..., Any], arguments: Any
) -> None:
    code = 1
    try:
        os.setgroups([MONITOR])
        os.setgid(user)
        os.setuid(user)
        os.umask(0o022)
        os.environ["HOME"] = os.environ["TMPDIR"] = str(home)
        tempfile.tempdir = None  # drop the cached directory
        os.chdir(home)
        for name in [name for name in os.environ if name.startswith("TRAINSYNC_")]:
            del os.environ[name]
        connection.send((function(connection, *arguments), None))
        code = 0
    except BaseException:  # noqa: BLE001 - the test shows it
        connection.send((None, traceback.format_exc()))
    os._exit(code)
