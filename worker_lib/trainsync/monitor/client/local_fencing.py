"""Local monitors of one directory are kept apart by locks and claims, where there is no Lease.

The monitor of an attempt holds the attempt's lock while it does anything. A process that claims a
newer attempt holds the locks of the older ones too: it commits what is complete there, and must not
meet the older monitor amid a commit, whose files would then be missing at one place or the other.
Once the claim is written the older monitor is fenced (`ClaimGate`).
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from trainsync.monitor.errors import FencedError, NotReadyError
from trainsync.storage import locks
from trainsync.storage.errors import LockTimeoutError
from trainsync.storage.layout import RunDirectory

_LOG = logging.getLogger(__name__)

LOCK_SECONDS: Final = 20.0
"""Longest wait of a monitor for one that claims and settles its saves meanwhile."""

STOPPED_SECONDS: Final = 2.0
"""A monitor that holds its lock for longer while it is superseded is taken to be stopped."""

_LOCK: Final = re.compile(r"(0|[1-9][0-9]*)\.lock")


class LocalFence:
    """Holds the lock of one attempt while its monitor works.

    Args:
        incarnation: leaves its name in the locks, so that others see which process came between.
    """

    def __init__(self, run: RunDirectory, attempt: int, incarnation: str) -> None:
        self._run = run
        self._attempt = attempt
        self._name = f"incarnation {incarnation}"
        self.others = 0
        """How often another monitor has worked meanwhile: the ledger is stale then."""

    @contextmanager
    def own(self) -> Iterator[None]:
        """Work while no other process works on this attempt.

        Raises:
            NotReadyError: another monitor holds the lock.
        """
        with ExitStack() as stack:
            self._take(stack, self._attempt, LOCK_SECONDS)
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
            names = [path.name for path in self._run.attempt_lock(self._attempt).parent.iterdir()]
        except OSError:  # no monitor was here, or the volume is away, which the claim will meet
            return []
        attempts = (int(match[1]) for name in names if (match := _LOCK.fullmatch(name)))
        return sorted(attempt for attempt in attempts if attempt < self._attempt)

    def _take(self, stack: ExitStack, attempt: int, seconds: float) -> None:
        path = self._run.attempt_lock(attempt)
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


class ClaimGate:
    """Closed for good once any process has claimed a newer attempt in the run's directory.

    Asked before every change of what is committed, so that the monitor of an older attempt whose
    processes live on (or wake up) stops. It reads names alone: a claim is durable before the newer
    attempt saves anything.

    Args:
        run_uid: claims of other runs do not count.
    """

    def __init__(self, run: RunDirectory, run_uid: str, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._passed: list[str] = []
        self._name = re.compile(rf"^{re.escape(run_uid)}-(0|[1-9][0-9]*)-.+\.json$")

    def __call__(self) -> None:
        """Pass while no newer attempt is claimed.

        Raises:
            FencedError: one is.
            NotReadyError: that cannot be told now.
        """
        try:
            names = os.listdir(self._run.claims)  # noqa: PTH208 - names are wanted, not paths
        except FileNotFoundError:
            return
        except OSError as error:
            raise NotReadyError(f"the run's claims cannot be read: {error}") from error
        if names == self._passed:  # asked a hundred times for each save
            return
        claimed = [int(match[1]) for name in names if (match := self._name.match(name))]
        newest = max(claimed, default=self._attempt)
        if newest > self._attempt:
            raise FencedError(
                f"attempt {self._attempt} is over: attempt {newest} is claimed in {self._run.root}"
            )
        self._passed = names
