"""Which process hosts the monitor of a local run: one at a time, for as long as it lives."""

import logging
import os
import socket
import weakref
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Final

from trainsync.storage import locks
from trainsync.storage.errors import LockTimeoutError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import claims

_LOG = logging.getLogger(__name__)

TAKE_OVER_SECONDS: Final = 5.0
"""For a process that is about to end; longer than that a start does not wait for another."""


class Hosting:
    """Held by the hosting process; the system lets go of it when that process dies.

    On a volume without locks nothing is held, and a second start takes over from the first.

    Raises:
        LockTimeoutError: another process hosts; says which.
    """

    def __init__(self, run: RunDirectory, timeout: float = TAKE_OVER_SECONDS) -> None:
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        note = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        self._stack = ExitStack()
        try:
            self._stack.enter_context(locks.exclusive(run.host_lock, timeout, note))
        except OSError as error:  # what comes next meets the same fault, and says more
            _LOG.warning("nothing keeps a second start off %s: %s", run.root, error)
        _all.add(self)

    def release(self) -> None:
        """Let others host. In a forked child: only that the child does not hold it, too."""
        self._stack.close()


_all: "weakref.WeakSet[Hosting]" = weakref.WeakSet()


def _release_all() -> None:
    for hosting in list(_all):
        hosting.release()


os.register_at_fork(after_in_child=_release_all)  # a DataLoader's worker may outlive its parent


def has_ended(run: RunDirectory) -> bool:
    """Whether the run is known to be over for now: a local one, whose host has ended.

    Raises:
        OSError, DamagedFileError: that cannot be told.
    """
    if not run.host_lock.is_file() or not claims.read_claims(run, claims.LOCAL_UID):
        return False
    if any(claim.run_uid != claims.LOCAL_UID for claim in claims.all_claims(run)):
        return False  # of a cluster's run, whose monitor holds no such lock
    try:
        with locks.exclusive(run.host_lock, 0.0, "a look at whether the run is over") as lock:
            return lock.held
    except LockTimeoutError:
        return False
