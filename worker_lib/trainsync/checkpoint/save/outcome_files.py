"""Reads from the disk, in the background, how saves ended that this process wrote a part of."""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.api.spec import UNREGISTERED_WARNING_SECONDS
from trainsync.checkpoint.save.missing import how_to_register
from trainsync.checkpoint.save.places.base import SaveRecords
from trainsync.storage.errors import StorageError

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""How long a caller waits for a look at most: a volume that hangs must not hold up training."""

_LONGEST_SECONDS: Final = 5.0

Heard = Callable[[SaveKind, int, str], None]
"""Called with kind, step and cause of an abort."""

Ended = Callable[[SaveKind, int, bool], None]
"""Called with kind and step of a save that has ended, and whether it is committed."""


class OutcomeFiles:
    """Finds the aborts that the monitor decided, without a request to the monitor.

    Only the process that registered a save asks the monitor for its outcome; the others find
    ``ABORTED.json`` in the save's staging directory. A thread looks there while a save is open: a
    second after a part was written, then less and less often, and at once for `look`.

    Args:
        heard: called in that thread, once for each abort.
        lost_after: seconds after which a save's outcome is not expected any more.
        first_look: seconds until the first look after a part was written.
        unregistered: seconds after which a save that is not registered is warned of.
        ended: called in that thread, once for each save whose outcome was found.
    """

    def __init__(
        self,
        heard: Heard,
        lost_after: float,
        *,
        first_look: float = 1.0,
        unregistered: float = UNREGISTERED_WARNING_SECONDS,
        ended: Ended = lambda kind, step, committed: None,
    ) -> None:
        self._heard = heard
        self._tell_ended = ended
        self._lost_after = lost_after
        self._first_look = first_look
        self._warn_after = unregistered
        self._open: dict[tuple[SaveKind, int], tuple[SaveRecords, float]] = {}
        self._unregistered: dict[tuple[SaveKind, int], float] = {}  # when to warn of each
        self._changed = threading.Condition()  # guards all of these
        self._asked = 0  # calls of `look`
        self._looked = 0  # of those, answered
        self._interval = first_look
        self._next = 0.0  # time of the next look
        self._is_running = False
        self._is_ended = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is open."""
        return self._is_running

    def add(self, kind: SaveKind, step: int, records: SaveRecords) -> None:
        """A part of that save is written. Never blocks on the disk."""
        with self._changed:
            if self._is_ended:
                return
            self._open.setdefault((kind, step), (records, time.monotonic() + self._lost_after))
            self._unregistered.setdefault((kind, step), time.monotonic() + self._warn_after)
            self._interval, soon = self._first_look, time.monotonic() + self._first_look
            if not self._is_running:
                self._next = soon
                self._start()
            elif soon < self._next:
                self._next = soon
                self._changed.notify_all()

    def look(self, timeout: float = LOOK_SECONDS) -> None:
        """Hear of the aborts that are on the disk by now, as far as ``timeout`` seconds allow.

        Returns at once while an earlier look hangs.
        """
        with self._changed:
            if self._is_running and self._asked == self._looked:
                self._asked += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._asked == self._looked, timeout)

    def end(self) -> None:
        """Look for no more outcomes, since the caller hears of aborts in another way."""
        with self._changed:
            self._is_ended = True
            self._open.clear()
            self._unregistered.clear()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """`end`, and wait ``timeout`` seconds at most for the thread."""
        self.end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="trainsync-outcomes", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left; the next part tries again
            logger.warning("aborts are not watched: %s", error)
        else:
            self._is_running, self._thread = True, thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wait()
                self._interval = min(2 * self._interval, _LONGEST_SECONDS)
                self._next = time.monotonic() + self._interval
                asked, looked_at = self._asked, dict(self._open)
            ended = [key for key, save in looked_at.items() if self._has_ended(key, *save)]
            with self._changed:
                for key in ended:
                    self._open.pop(key, None)
                    self._unregistered.pop(key, None)
                self._is_running = bool(self._open)
                self._looked = asked if self._is_running else self._asked
                self._changed.notify_all()
                if not self._is_running:
                    return

    def _wait(self) -> None:
        """Wait until a look is due, or asked for."""
        while self._asked == self._looked and not self._is_ended:
            left = self._next - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _warn(self, key: tuple[SaveKind, int], records: SaveRecords) -> None:
        """Once, of a save that was not registered for too long. Raises `OSError`."""
        if time.monotonic() < self._unregistered.get(key, math.inf) or self._is_ended:
            return
        self._unregistered[key] = math.inf
        if records.registration() is None:
            kind, step = key
            logger.warning(
                "%s of step %d is written here and not registered after %g s, so that it cannot "
                "commit and will be aborted; %s",
                kind.value,
                step,
                self._warn_after,
                how_to_register(kind, step),
            )

    def _has_ended(self, key: tuple[SaveKind, int], records: SaveRecords, lost_at: float) -> bool:
        try:
            outcome = records.outcome()
            # Gone: a newer attempt is in force, or the outcome is old and was removed.
            gone = outcome is None and not records.is_there()
            if outcome is None and not gone:
                self._warn(key, records)
        except (OSError, StorageError) as error:
            logger.debug("%s of step %d: the outcome cannot be read: %s", *key, error)
            return time.monotonic() > lost_at
        if outcome is not None and outcome.error is not None and not self._is_ended:
            self._heard(*key, outcome.error)
        if outcome is not None:
            self._tell_ended(*key, outcome.error is None)
        return outcome is not None or gone or time.monotonic() > lost_at
