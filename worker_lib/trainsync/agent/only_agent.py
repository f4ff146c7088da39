"""One agent for each server: a lock in the memory that the agent shares with the server."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from trainsync.engines.servers.place import place_of
from trainsync.storage import locks
from trainsync.storage.errors import LockTimeoutError

_TRIES: Final = 100


class AnotherAgentError(Exception):
    """Another agent drives the server."""


@contextmanager
def only_agent(memory: Path, url: str, wait: float = 2.0) -> Iterator[None]:
    """Be the one agent of the server in the block; the lock goes with the process.

    Args:
        memory: the memory file system in which versions are staged.
        wait: seconds for an agent that ends to release the server.

    Raises:
        AnotherAgentError: another agent drives the server.
        OSError: the memory cannot be written to.
    """
    path = memory / f"trainsync-agent-{place_of(url)}.lock"
    with ExitStack() as stack:
        fd = _acquire(stack, path, url, wait)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()}".encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _acquire(stack: ExitStack, path: Path, url: str, wait: float) -> int:
    for _ in range(_TRIES):
        with ExitStack() as attempt:
            try:
                fd, _held = attempt.enter_context(locks.opened(path, wait))
            except LockTimeoutError as error:
                raise AnotherAgentError(f"another agent drives {url}: {error}") from error
            if _is_there(path, fd):  # else the one before removed it as it ended
                stack.push(attempt.pop_all())
                return fd
    raise AnotherAgentError(f"other agents of {url} come and go: {path} is removed again and again")


def _is_there(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
