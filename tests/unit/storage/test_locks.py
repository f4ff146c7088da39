"""Locks, and processes that were forked while one was held."""

import os
import signal
from pathlib import Path

import pytest
from trainsync.storage import locks
from trainsync.storage.errors import LockTimeoutError


def forked(act: str) -> int:
    """A child that lives until it is killed, or (``"leaves"``) leaves the lock's block at once."""
    child = os.fork()
    if child:
        return child
    if act == "lives":
        signal.pause()
        os._exit(0)
    raise SystemExit


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locks.exclusive(path, 1, "first"):
        child = forked("lives")
    try:
        with locks.exclusive(path, 1, "second") as lock:
            assert lock.held and lock.before == "first"
    finally:
        end(child)


def test_a_process_that_was_forked_meanwhile_cannot_give_the_lock_away(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    child = 0
    try:
        with locks.exclusive(path, 1, "first"):
            child = forked("leaves")
            os.waitpid(child, 0)
            with pytest.raises(LockTimeoutError, match="held by first"), locks.exclusive(path, 0):
                pass
    finally:
        if child == 0:  # whatever the child meets, it is no second pytest
            os._exit(0)
