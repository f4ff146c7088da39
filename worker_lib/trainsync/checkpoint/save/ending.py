"""Ends the threads of a process when the interpreter exits: in order, and within a bound.

A daemon thread that runs on while the interpreter is taken down can abort the process from inside
torch's C++ (exit code 134). So an object with such threads is known here, and ended before that.
"""

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from typing import Final, Protocol

from trainsync.checkpoint.errors import CoordinatorClosedError, ForkedError

logger = logging.getLogger(__name__)

EXIT_SECONDS: Final = 120.0
"""How long a process that exits goes on writing what was staged, at most."""

STOP_SECONDS: Final = 2.0
"""How long threads that were told to end are waited for."""

over = threading.Event()
"""Set when a process that exits writes no longer: writers give up at the next block."""


class ThreadOwner(Protocol):
    """Has threads, and ends them."""

    def end(self, deadline: float) -> None:
        """Finish what was begun until ``deadline`` (`time.monotonic`), and end the threads."""
        ...


class Lifetime:
    """Whether calls are still taken: in the process that made this, and until `end`."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._ended = False

    def end(self) -> None:
        """The context that made the coordinator is closed."""
        self._ended = True

    def check_process(self, what: str) -> None:
        """Raises `ForkedError` in a child of the process that made this."""
        if os.getpid() != self._process:
            raise ForkedError(
                f"{what}: this process was forked from the one that made the coordinator, "
                "and has neither its memory nor its threads; make a coordinator in each process"
            )

    def check_open(self, what: str) -> None:
        """Raises `ForkedError`, or `CoordinatorClosedError` after `end`."""
        self.check_process(what)
        if self._ended:
            raise CoordinatorClosedError(
                f"{what}: the context that made this coordinator is closed: nothing is saved any "
                "more"
            )


_kept: "dict[int, ThreadOwner]" = {}  # by id()
_known: "weakref.WeakSet[ThreadOwner]" = weakref.WeakSet()


def keep(owner: ThreadOwner) -> None:
    """End ``owner`` at exit, before those of `know`; kept alive until then."""
    _kept[id(owner)] = owner


def know(owner: ThreadOwner) -> None:
    """End ``owner`` at exit, if it still lives."""
    _known.add(owner)


def forget(owner: ThreadOwner) -> None:
    """``owner`` has ended."""
    _kept.pop(id(owner), None)
    _known.discard(owner)


def interrupted() -> bool:
    """Whether the process exits because of Ctrl-C: no other process is waited for then."""
    kind = getattr(sys, "last_type", None)
    return isinstance(kind, type) and issubclass(kind, KeyboardInterrupt)


def _forget_all() -> None:
    """In a forked child: the threads, and their work, are the parent's."""
    _kept.clear()
    _known.clear()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for owner in (*_kept.values(), *_known):
        try:
            owner.end(deadline)
        except KeyboardInterrupt:  # again: nothing is waited for any more
            deadline = time.monotonic()
            over.set()
        except Exception as error:  # noqa: BLE001 - the others are ended all the same
            logger.error("at exit: %s: %s", type(error).__name__, error)
