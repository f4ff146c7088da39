"""What a process still has to end when the interpreter exits: in order, and within a bound.

A daemon thread that runs on while the interpreter is taken down can abort the process from inside
torch's C++ (exit code 134). So what has threads says so here, and is ended before that.
"""

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from typing import Final, Protocol

logger = logging.getLogger(__name__)

EXIT_SECONDS: Final = 120.0
"""How long a process that exits goes on writing what was staged, at most."""

STOP_SECONDS: Final = 2.0
"""How long threads that were told to end are waited for."""

over = threading.Event()
"""Set when a process that exits writes no longer: whoever writes gives up at the next block."""


class Ending(Protocol):
    """Has threads, and ends them."""

    def end(self, deadline: float) -> None:
        """Finish what was begun until ``deadline`` (`time.monotonic`), and end the threads."""
        ...


_kept: "dict[int, Ending]" = {}  # by id()
_known: "weakref.WeakSet[Ending]" = weakref.WeakSet()


def keep(owner: Ending) -> None:
    """End ``owner`` at exit, before those of `know`, although nobody else may have it then."""
    _kept[id(owner)] = owner


def know(owner: Ending) -> None:
    """End ``owner`` at exit, if it still lives."""
    _known.add(owner)


def forget(owner: Ending) -> None:
    """It has ended."""
    _kept.pop(id(owner), None)
    _known.discard(owner)


def interrupted() -> bool:
    """Whether the process exits because of Ctrl-C: no other process is waited for then."""
    kind = getattr(sys, "last_type", None)
    return isinstance(kind, type) and issubclass(kind, KeyboardInterrupt)


def _forget_all() -> None:
    """In a forked child: threads, and what they were at, are the parent's."""
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
