"""Makes the calls of explorers in other Ray clusters, which the monitor has, and answers them.

In the process that made the Synchronizer. Calls wait in the actor, not in threads: there may be two
for each of thousands of explorers.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import ray

from trainsync.api.protocol import SynchronizerAnswer, SynchronizerAnswers, SynchronizerCall
from trainsync.monitor.client.base import ExchangeClient
from trainsync.runtime.relays import Relay
from trainsync.weights import threads
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.synchronizer.ray_errors import one_sentence, raised_there
from trainsync.weights.synchronizer.remote_calls import (
    decode_arguments,
    encode_answer,
    encode_error,
)

_POLL_SECONDS: Final = 25.0  # the monitor answers as soon as there is a call
_LOOK_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 0.2
# Longer than it takes to notice that the actor died and to start another process.
_REBUILD_SECONDS: Final = 60.0
_MOST_AT_ONCE: Final = 256


@dataclass(frozen=True)
class _Made:
    """A call that the actor has answered, or died before; ``since`` is when it first died."""

    call: SynchronizerCall
    since: float | None
    outcome: Any


class CallRelay:
    """Fetches calls in one thread and sends answers in another, until `close`.

    When the actor died, the call is made again on the one that replaces it.

    Args:
        monitor: of the run.
        synchronizer: gives the handle of the present actor.
    """

    def __init__(self, monitor: ExchangeClient, synchronizer: Callable[[], Any]) -> None:
        made: queue.SimpleQueue[_Made] = queue.SimpleQueue()
        calls = _Calls(synchronizer, made)
        self._relays = (_Fetch(monitor, calls), _Send(monitor, calls, made))

    def close(self, timeout: float) -> bool:
        """See `Relay.close`."""
        deadline = time.monotonic() + timeout
        closed = [relay.close(max(0.0, deadline - time.monotonic())) for relay in self._relays]
        return all(closed)

    @property
    def failed(self) -> int:
        """How many requests to the monitor failed."""
        return sum(relay.failed for relay in self._relays)


class _Calls:
    """Makes calls of the actor."""

    def __init__(self, synchronizer: Callable[[], Any], made: "queue.SimpleQueue[_Made]") -> None:
        self._synchronizer = synchronizer
        self._made = made

    def make(self, call: SynchronizerCall, since: float | None = None) -> None:
        """Make a call; its outcome, whatever that is, comes to the queue."""

        def done(future: Any) -> None:
            error = future.exception()
            self._made.put(_Made(call, since, error if error is not None else future.result()))

        try:
            arguments = decode_arguments(call.method, call.arguments)
            method = getattr(self._synchronizer(), call.method)
            method.remote(*arguments).future().add_done_callback(done)
        except Exception as error:  # noqa: BLE001 - the caller is to hear of it
            self._made.put(_Made(call, since, error))


class _Fetch(Relay):
    def __init__(self, monitor: ExchangeClient, calls: _Calls) -> None:
        self._monitor, self._calls = monitor, calls
        self._epoch, self._after = "", 0
        super().__init__("trainsync-calls", "explorers in other Ray clusters are not heard")

    def _pass_on(self) -> None:
        news = self._monitor.synchronizer_calls(self._epoch, self._after, _POLL_SECONDS)
        with self._while_open() as is_open:
            self._epoch, self._after = news.epoch, news.last
            for call in news.calls if is_open else ():
                self._calls.make(call)


class _Send(Relay):
    def __init__(
        self, monitor: ExchangeClient, calls: _Calls, made: "queue.SimpleQueue[_Made]"
    ) -> None:
        self._monitor, self._calls, self._made = monitor, calls, made
        self._unsent: list[SynchronizerAnswer] = []
        super().__init__("trainsync-answers", "explorers in other Ray clusters are not answered")

    def _pass_on(self) -> None:
        while len(self._unsent) < _MOST_AT_ONCE:
            try:
                made = self._made.get(timeout=0.0 if self._unsent else _LOOK_SECONDS)
            except queue.Empty:
                break
            answer = self._answer(made)
            if answer is not None:
                self._unsent.append(answer)
        with self._while_open() as is_open:
            if self._unsent and is_open:
                self._monitor.answer_synchronizer(SynchronizerAnswers(answers=self._unsent))
                self._unsent = []

    def _answer(self, made: _Made) -> SynchronizerAnswer | None:
        """The answer; None if the call is made again."""
        call, outcome = made.call, made.outcome
        if isinstance(outcome, ray.exceptions.RayActorError):
            now = time.monotonic()
            since = now if made.since is None else made.since
            if now - since < _REBUILD_SECONDS and threads.ray_is_there():
                again = threading.Timer(_AGAIN_SECONDS, self._calls.make, (call, since))
                again.daemon = True
                again.start()
                return None
            outcome = WeightsUnavailableError(f"the Synchronizer is gone: {one_sentence(outcome)}")
        elif isinstance(outcome, ray.exceptions.RayTaskError):
            outcome = raised_there(outcome)
        if isinstance(outcome, BaseException):
            return SynchronizerAnswer(id=call.id, error=encode_error(outcome))
        return SynchronizerAnswer(id=call.id, value=encode_answer(call.method, outcome))
