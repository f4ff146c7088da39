"""The Synchronizer for explorers of another Ray cluster, which reach that by the run's monitor."""

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from trainsync.api.protocol import SynchronizerCall
from trainsync.monitor.client.base import ExchangeClient
from trainsync.monitor.errors import (
    ClientClosedError,
    FencedError,
    MonitorError,
    MonitorUnavailableError,
    NotReadyError,
    NotYetError,
    StorageUnavailableError,
    TooManyWaitersError,
    UnauthenticatedError,
)
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.synchronizer.followed_state import Contact
from trainsync.weights.synchronizer.remote_calls import (
    decode_answer,
    decode_error,
    encode_arguments,
)

logger = logging.getLogger(__name__)

# Less than a lease, with the time that a request may take on its way: see `CallRelay`.
_WAIT_SECONDS: Final = 8.0
# With a question that may end the wait at any time.
_LOOK_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.5
_PASSING: Final = (
    MonitorUnavailableError,
    NotReadyError,
    NotYetError,
    StorageUnavailableError,
    TooManyWaitersError,
    UnauthenticatedError,  # while the keys, or the token's file, are replaced
)
_OVER: Final = (FencedError, ClientClosedError)


class RemoteSynchronizer:
    """In place of the actor's handle. Any thread may use it; it cannot be pickled.

    Args:
        monitor: of the run.

    Attributes:
        over: the attempt is over, or the client of the monitor closed.
    """

    def __init__(self, monitor: ExchangeClient) -> None:
        self._monitor = monitor
        self.over = False

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout: float,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        """See `SynchronizerConnection.call`; while the monitor is away, it is asked again.

        Raises:
            FencedError: the attempt is over: end this process.
        """
        deadline = time.monotonic() + timeout
        call = SynchronizerCall(
            id=secrets.token_hex(8), method=method, arguments=encode_arguments(method, arguments)
        )
        longest = _WAIT_SECONDS if give_up is None else _LOOK_SECONDS
        while True:
            left = deadline - time.monotonic()
            away: Exception | None = None
            try:
                reply = self._monitor.call_synchronizer(call, min(max(left, 0.0), longest))
                if reply.error is not None:
                    raise decode_error(reply.error)
                if reply.done:
                    return decode_answer(method, reply.value)
            except _PASSING as error:
                away = error
            except _OVER:
                self.over = True
                raise
            except MonitorError as error:
                raise WeightsUnavailableError(
                    f"the monitor does not pass on {method}: {error}"
                ) from error
            if give_up is not None and give_up():
                return None
            if deadline <= time.monotonic():
                why = "the trainers' cluster said nothing" if away is None else str(away)
                raise WeightsUnavailableError(
                    f"the Synchronizer did not answer {method} within {timeout:g} s: {why}"
                ) from away
            if away is not None:
                time.sleep(_PAUSE_SECONDS)


class RemoteConnection:
    """As `SynchronizerConnection`, which has the arguments.

    Attributes:
        contact: of the Synchronizer that answered first.
    """

    def __init__(self, synchronizer: RemoteSynchronizer, timeout: float) -> None:
        self._synchronizer = synchronizer
        self.contact: Contact = synchronizer.call("get_contact", timeout=timeout)

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout: float,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        """See `SynchronizerConnection.call`. Calls of explorers may always be repeated."""
        try:
            return self._synchronizer.call(method, *arguments, timeout=timeout, give_up=give_up)
        except WeightsUnavailableError as error:
            if method != "leave":
                raise
            logger.info("the trainers may have ended before this explorer: %s", error)
            return None

    def lasts(self) -> bool:
        """See `SynchronizerConnection.lasts`."""
        return not self._synchronizer.over
