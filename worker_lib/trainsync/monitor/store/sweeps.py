"""`Sweeps`: when what incarnations that are over have left in a store is removed."""

import math
from collections.abc import Callable
from typing import Final

from trainsync.monitor import errors
from trainsync.monitor.store import cleanup
from trainsync.monitor.store.executor import StoreExecutor
from trainsync.monitor.store.term_hold import TermHold
from trainsync.storage.objects.bucket import ObjectBucket

_SWEEPS: Final = 2
_SWEEP_SECONDS: Final = 900.0
"""Until the second sweep, of what processes that were deposed have put late."""
_SWEEP_AGAIN_SECONDS: Final = 60.0
"""After one that the store refused, or that a save held up."""


class Sweeps:
    """Plans sweeps and does them. Owned by the core's thread. See `cleanup.sweep` for what goes.

    Args:
        reading_seconds: how long a reader may be at a state dict that was superseded.
        monotonic: seconds that only ever go on.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        worker: StoreExecutor,
        hold: TermHold,
        *,
        reading_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._bucket = bucket
        self._worker = worker
        self._hold = hold
        self._reading_seconds = reading_seconds
        self._monotonic = monotonic
        self._left, self._due_at = 0, math.inf

    def begin(self) -> None:
        """Sweep now, since an incarnation is over, and once more a while later.

        Raises:
            FencedError: the term is lost.
        """
        self._left = _SWEEPS
        self._sweep()

    def plan(self) -> None:
        """Have a sweep once no reader is at what was superseded any more."""
        self._worker.has_superseded = False
        later = self._monotonic() + self._reading_seconds
        if later < self._due_at:  # what is planned comes after it
            self._left, self._due_at = self._left + 1, later

    def advance(self) -> None:
        """Plan a sweep of what was superseded since, and do one that is due.

        Raises:
            FencedError: the term is lost.
        """
        if self._worker.has_superseded:
            self.plan()
        if self._monotonic() >= self._due_at:
            self._sweep()

    def _sweep(self) -> None:
        try:
            with self._hold.kept():
                done = cleanup.sweep(self._bucket, self._worker.ledger, self._hold.see_right)
        except errors.StorageUnavailableError as error:
            self._worker.health.io_error("sweep", str(error))
            self._due_at = self._monotonic() + _SWEEP_AGAIN_SECONDS
            return
        self._worker.health.solved("sweep")
        if not done:
            self._due_at = self._monotonic() + _SWEEP_AGAIN_SECONDS
            return
        self._left -= 1
        # Readers of what the attempt supersedes began before it.
        pause = max(_SWEEP_SECONDS, self._reading_seconds)
        self._due_at = self._monotonic() + pause if self._left else math.inf
