"""Local monitors of one directory work in turns, where no Lease keeps them apart.

The monitor of an attempt holds the attempt's lock while it does anything. A process that claims a
newer attempt holds the locks of the older ones too: it commits what is complete there, and must not
meet the older monitor amid a commit, whose files would then be missing at one place or the other.
Once the claim is written the older monitor is fenced (`trainsync.monitor.client.local_gate`).
"""

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from trainsync.monitor.errors import NotReadyError
from trainsync.storage import locks
from trainsync.storage.errors import LockTimeoutError
from trainsync.storage.layout import RunDirectory

_LOG = logging.getLogger(__name__)

TURN_SECONDS: Final = 20.0
"""Longest wait of a monitor for one that claims and settles its saves meanwhile."""

STOPPED_SECONDS: Final = 2.0
"""A monitor that holds its lock for longer while it is superseded is taken to be stopped."""

_LOCK: Final = re.compile(r"(0|[1-9][0-9]*)\.lock")


class LocalTurns:
    """The turns of the monitor of one attempt.

    Args:
        incarnation: leaves its name in the locks, so that others see which process came between.
    """

    def __init__(self, run: RunDirectory, attempt: int, incarnation: str) -> None:
        self._run = run
        self._attempt = attempt
        self._name = f"incarnation {incarnation}"
        self.others = 0
        """How often another monitor has worked between two turns: what is known is stale then."""

    @contextmanager
    def own(self) -> Iterator[None]:
        """Work while no other process works on this attempt.

        Raises:
            NotReadyError: another monitor holds the lock.
        """
        with ExitStack() as stack:
            self._take(stack, self._attempt, TURN_SECONDS)
            yield

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Work, inside `own`, while the monitors of older attempts wait.

        One that keeps its lock is not waited for: it is stopped, and will find itself fenced.
        """
        with ExitStack() as stack:
            for attempt in self._older():
                try:
                    self._take(stack, attempt, STOPPED_SECONDS)
                except NotReadyError as error:
                    _LOG.warning("attempt %d is superseded while it works: %s", attempt, error)
            yield

    def _older(self) -> list[int]:
        try:
            names = [path.name for path in self._run.turn_lock(self._attempt).parent.iterdir()]
        except OSError:  # no monitor was here, or the volume is away, which the claim will meet
            return []
        attempts = (int(match[1]) for name in names if (match := _LOCK.fullmatch(name)))
        return sorted(attempt for attempt in attempts if attempt < self._attempt)

    def _take(self, stack: ExitStack, attempt: int, seconds: float) -> None:
        path = self._run.turn_lock(attempt)
        try:
            lock = stack.enter_context(locks.exclusive(path, seconds, self._name))
        except LockTimeoutError as error:
            raise NotReadyError(str(error)) from error
        except OSError as error:
            # As on a volume without locks; what the monitor then does meets the same fault.
            _LOG.warning("the monitor goes on without %s: %s", path, error)
            return
        if lock.before not in ("", self._name):
            self.others += 1
