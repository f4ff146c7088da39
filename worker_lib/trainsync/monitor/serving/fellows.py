"""Which agents pass versions on to one another, and the key by which they know each other."""

import secrets
import threading
import time
from collections.abc import Callable

from trainsync.api.protocol import Fellow, FellowsAnswer
from trainsync.monitor.errors import TooManyWaitersError
from trainsync.monitor.serving.roster import MOST_SERVERS, SILENT_SECONDS


class Fellows:
    """Any thread. The key is new in each process: agents hear of it within seconds.

    Args:
        clock: seconds that only ever go on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[str, float]] = {}
        self._key = secrets.token_hex(32)

    def report(self, pod: str, address: str) -> FellowsAnswer:
        """A pod's agent passes versions on at ``address``.

        Raises:
            TooManyWaitersError: there are too many agents.
        """
        now = self._clock()
        with self._lock:
            self._heard = {
                name: entry
                for name, entry in self._heard.items()
                if now - entry[1] <= SILENT_SECONDS
            }
            if pod not in self._heard and len(self._heard) >= MOST_SERVERS:
                raise TooManyWaitersError(f"{MOST_SERVERS} agents pass versions on already")
            self._heard[pod] = address, now
            others = sorted((n, a) for n, (a, _) in self._heard.items() if n != pod)
        fellows = [Fellow(name=name, address=address) for name, address in others]
        return FellowsAnswer(me=pod, key=self._key, fellows=fellows)
