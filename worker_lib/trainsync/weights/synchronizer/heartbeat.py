"""Signs of life: a thread that tells the Synchronizer, again and again, that an explorer lives."""

import logging
import threading
import weakref
from typing import Protocol

from trainsync.weights import threads
from trainsync.weights.transports.shared_memory.segment_store import Sweeper

logger = logging.getLogger(__name__)


class LeaseHolder(Protocol):
    """Whoever lives."""

    def renew(self, timeout: float) -> None:
        """Say so, within ``timeout`` seconds."""
        ...


class RenewalTimer:
    """When a sign of life is due: after a time, or at once when there is news."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = False
        self._news = False

    def beat(self) -> None:
        """There is news."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def set(self) -> None:
        """No more signs of life."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def is_set(self) -> bool:
        """Whether there will be no more."""
        return self._ended

    def wait(self, seconds: float) -> bool:
        """Until the next one is due, at most ``seconds``; True when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._news, seconds)
            self._news = False
            return self._ended


def beat_on(client: "weakref.ref[LeaseHolder]", ended: RenewalTimer, seconds: float) -> None:
    """Let it say so every ``seconds`` until ``ended``, or until nobody holds it any more.

    What a trainer that was killed left in this host's shared memory is removed on the way.
    """
    silent = False
    sweeper = Sweeper()
    while not ended.wait(seconds):
        sweeper.sweep()
        alive = client()
        if alive is None or not threads.ray_is_there():
            return
        try:
            alive.renew(timeout=2 * seconds)
            silent = False
        except Exception as error:  # noqa: BLE001 - whatever it was, the next one may be heard
            if not threads.ray_is_there():
                return  # whoever uses the client is told
            if not silent and not ended.is_set():
                cause = str(error) or type(error).__name__
                logger.warning("no sign of life could be given: %s", cause)
            silent = True
        del alive
