"""An explorer's registration at the Synchronizer: a lease that a thread renews.

An explorer that was given up, or whose Synchronizer was rebuilt, registers again by itself.
"""

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

from trainsync.weights import threads
from trainsync.weights.errors import (
    ExplorerLostError,
    ExplorerReplacedError,
    UnknownExplorerError,
)
from trainsync.weights.synchronizer.connection import Connection
from trainsync.weights.synchronizer.roster import Serving
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.transports.shared_memory.segment_store import Sweeper

logger = logging.getLogger(__name__)

_RENEWALS_IN_A_LEASE: Final = 3


class LeaseHolder(Protocol):
    """Holds a lease."""

    def renew(self, timeout: float) -> None:
        """Renew it within ``timeout`` seconds."""
        ...


class RenewalTimer:
    """Says when to renew a lease: after a time, or at once when there is news."""

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
        """End the renewals."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def is_set(self) -> bool:
        """Whether the renewals have ended."""
        return self._ended

    def wait(self, seconds: float) -> bool:
        """Until the next renewal is due, at most ``seconds``; True when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._news, seconds)
            self._news = False
            return self._ended


class Registration:
    """One explorer process at the Synchronizer, from `register_explorer` to `leave`. Any thread.

    Args:
        synchronizer: actor handle.
        explorer: id of the explorer.
        timeout: seconds to register.
        source: of its weights, which is stopped when another process has the explorer's id.

    Attributes:
        session: random name of this process.
        timer: of the thread that renews the lease, which ends when the registration is not held
            any more.
    """

    def __init__(
        self, synchronizer: Any, explorer: str, timeout: float, source: WeightSource
    ) -> None:
        self.explorer = explorer
        self.session = secrets.token_hex(8)
        self.timer = RenewalTimer()
        self._source = source
        self._serving: Serving | None = None
        self._lock = threading.RLock()  # orders acknowledgements and registrations
        self._connection = Connection(synchronizer, timeout)
        self._connection.call("register_explorer", explorer, self.session, timeout=timeout)
        lease = self._connection.contact.lease_seconds
        threads.start(
            f"trainsync-{explorer}",
            renew_until,
            self.timer,
            weakref.ref(self),
            self.timer,
            lease / _RENEWALS_IN_A_LEASE,
        )

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout: float,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        """A call of the Synchronizer, for which this process registers again where that is needed.

        Raises:
            ExplorerReplacedError: another process has the explorer's id.
            What `Connection.call` raises.
        """
        try:
            return self._call(method, *arguments, timeout=timeout, give_up=give_up)
        except ExplorerReplacedError:
            # The trainer knows explorers by name: two of one name would take turns at its link.
            if not self.timer.is_set():
                logger.error("explorer %s is another process now; this one ends", self.explorer)
            self.timer.set()
            self._source.stop()
            raise

    def ask(self, method: str, *arguments: Any, timeout: float) -> Any:
        """A call that begins with the explorer and its session. Raises what `call` raises."""
        return self.call(method, self.explorer, self.session, *arguments, timeout=timeout)

    def acknowledge(self, weights: Weights, timeout: float) -> None:
        """Say that the explorer serves ``weights`` now. Raises what `call` raises."""
        with self._lock:
            version, digest, taken = weights.version, weights.digest, weights.taken
            self.ask("acknowledge", version, digest, taken, timeout=timeout)
            self._serving = Serving(version, digest, taken)

    def renew(self, timeout: float) -> None:
        """Renew the lease, and say what is served; a thread does so by itself."""
        self.ask("renew", self._serving, self._source.ready, timeout=timeout)

    def leave(self, timeout: float) -> None:
        """Say that this explorer goes; the thread ends."""
        self.timer.set()
        self._connection.call("leave", self.explorer, self.session, timeout=timeout)

    def _call(
        self,
        method: str,
        *arguments: Any,
        timeout: float,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        deadline = time.monotonic() + timeout

        def call() -> Any:
            left = _left(deadline)
            return self._connection.call(method, *arguments, timeout=left, give_up=give_up)

        try:
            return call()
        except (UnknownExplorerError, ExplorerLostError) as error:
            if self.timer.is_set():
                raise
            logger.warning("explorer %s registers again: %s", self.explorer, error)
            with self._lock:
                self._connection.call(
                    "register_explorer",
                    self.explorer,
                    self.session,
                    True,
                    self._serving,
                    timeout=_left(deadline),
                )
            self.timer.beat()  # whether it is ready is not known there any more
        return call()


def renew_until(holder: "weakref.ref[LeaseHolder]", ended: RenewalTimer, seconds: float) -> None:
    """Renew the lease every ``seconds`` until ``ended``, or until nothing refers to the holder.

    Shared memory that a killed trainer left on this host is removed on the way.
    """
    silent = False
    sweeper = Sweeper()
    while not ended.wait(seconds):
        sweeper.sweep()
        alive = holder()
        if alive is None or not threads.ray_is_there():
            return
        try:
            alive.renew(timeout=2 * seconds)
            silent = False
        except Exception as error:  # noqa: BLE001 - the next renewal may succeed
            if not threads.ray_is_there():
                return  # the next call of the client raises
            if not silent and not ended.is_set():
                cause = str(error) or type(error).__name__
                logger.warning("no sign of life could be given: %s", cause)
            silent = True
        del alive


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
