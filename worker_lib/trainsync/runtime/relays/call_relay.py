"""Makes the calls of explorers in other Ray clusters, which the monitor has, and answers them.

In the process that made the Synchronizer. Calls wait in the actor, not in threads: there may be two
for each of thousands of explorers.
"""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import ray

from trainsync.api.protocol import SynchronizerAnswer, SynchronizerAnswers, SynchronizerCall
from trainsync.monitor.client.base import ExchangeClient
from trainsync.monitor.errors import InvalidRequestError, TooLargeError
from trainsync.runtime.relays.monitor_relays import Relay
from trainsync.weights import threads
from trainsync.weights.errors import WeightsError, WeightsUnavailableError
from trainsync.weights.ray_errors import one_sentence, raised_there
from trainsync.weights.synchronizer.remote_calls import (
    decode_arguments,
    encode_answer,
    encode_error,
)
from trainsync.weights.synchronizer.roster import STOPPED

# The monitor answers as soon as there is a call. With the time that a request may take on its way,
# less than an explorer's lease: a monitor that is replaced costs no explorer.
_POLL_SECONDS: Final = 8.0
_LOOK_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 0.2
_RETRY_SECONDS: Final = 2.0
# Longer than it takes to notice that the actor died and to start another process.
_REBUILD_SECONDS: Final = 60.0
# After the end of training, for explorers to take the last version and leave.
_LEAVE_SECONDS: Final = 5.0
_DRAIN_SECONDS: Final = 1.0
_STATUS_SECONDS: Final = 2.0
_MOST_AT_ONCE: Final = 256
_REFUSED: Final = (InvalidRequestError, TooLargeError)


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
        self._calls = _ActorCalls(synchronizer, made)
        self._fetch = _Fetch(monitor, self._calls)
        self._send = _Send(monitor, self._calls, made)

    def close(self, timeout: float) -> bool:
        """See `Relay.close`. Explorers that training has told to end get a moment to leave."""
        deadline = time.monotonic() + timeout
        if self._calls.explorers and self._calls.training_ended():
            _wait(lambda: not self._calls.explorers, deadline, _LEAVE_SECONDS)
        closed = self._fetch.close(max(0.0, deadline - time.monotonic()))
        _wait(lambda: self._send.idle, deadline, _DRAIN_SECONDS)
        return self._send.close(max(0.0, deadline - time.monotonic())) and closed


class _ActorCalls:
    """Makes calls of the actor.

    Attributes:
        explorers: that registered, and have not left.
    """

    def __init__(self, synchronizer: Callable[[], Any], made: "queue.SimpleQueue[_Made]") -> None:
        self._synchronizer = synchronizer
        self._made = made
        self.explorers: set[str] = set()

    def make(self, call: SynchronizerCall, since: float | None = None) -> None:
        """Make a call; its answer or error comes to the queue."""

        def done(future: Any) -> None:
            error = future.exception()
            self._made.put(_Made(call, since, error if error is not None else future.result()))

        try:
            arguments = decode_arguments(call.method, call.arguments)
            if call.method == "register_explorer":
                self.explorers.add(arguments[0])
            method = getattr(self._synchronizer(), call.method)
            method.remote(*arguments).future().add_done_callback(done)
        except Exception as error:  # noqa: BLE001 - the caller is to hear of it
            self._made.put(_Made(call, since, error))

    def answered(self, call: SynchronizerCall) -> None:
        """The caller has the answer, as far as is known here."""
        if call.method == "leave" and call.arguments:
            self.explorers.discard(str(call.arguments[0]))

    def training_ended(self) -> bool:
        """Whether explorers hear that no version will come any more."""
        if not threads.ray_is_there():
            return False
        try:
            status = ray.get(self._synchronizer().get_status.remote(), timeout=_STATUS_SECONDS)
        except ray.exceptions.RayError:
            return False
        return bool(status.trainer_status == STOPPED)


class _Fetch(Relay):
    def __init__(self, monitor: ExchangeClient, calls: _ActorCalls) -> None:
        self._monitor, self._calls = monitor, calls
        self._epoch, self._after = "", 0
        undone = "explorers in other Ray clusters are not heard"
        super().__init__("trainsync-calls", undone, _RETRY_SECONDS)

    def _pass_on(self) -> None:
        news = self._monitor.synchronizer_calls(self._epoch, self._after, _POLL_SECONDS)
        with self._while_open() as is_open:
            self._epoch, self._after = news.epoch, news.last
            for call in news.calls if is_open else ():
                self._calls.make(call)


class _Send(Relay):
    def __init__(
        self, monitor: ExchangeClient, calls: _ActorCalls, made: "queue.SimpleQueue[_Made]"
    ) -> None:
        self._monitor, self._calls, self._made = monitor, calls, made
        self._unsent: list[tuple[SynchronizerCall, SynchronizerAnswer]] = []
        self._again: list[tuple[float, SynchronizerCall, float]] = []  # when, and since when
        undone = "explorers in other Ray clusters are not answered"
        super().__init__("trainsync-answers", undone, _RETRY_SECONDS)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send."""
        return self._made.empty() and not self._unsent

    def _pass_on(self) -> None:
        self._make_again()
        while len(self._unsent) < _MOST_AT_ONCE:
            seconds = _AGAIN_SECONDS if self._again else _LOOK_SECONDS
            try:
                made = self._made.get(timeout=0.0 if self._unsent else seconds)
            except queue.Empty:
                break
            answer = self._answer(made)
            if answer is not None:
                self._unsent.append((made.call, answer))
        with self._while_open() as is_open:
            if self._unsent and is_open:
                self._send()

    def _send(self) -> None:
        try:
            answers = [answer for _, answer in self._unsent]
            self._monitor.answer_synchronizer(SynchronizerAnswers(answers=answers))
        except _REFUSED:
            for _, answer in self._unsent:
                self._send_one(answer)
        for call, _ in self._unsent:
            self._calls.answered(call)
        self._unsent = []

    def _send_one(self, answer: SynchronizerAnswer) -> None:
        """Send one answer, or that the monitor refuses it: the others are not held up."""
        try:
            self._monitor.answer_synchronizer(SynchronizerAnswers(answers=[answer]))
        except _REFUSED as error:
            refused = encode_error(WeightsError(f"the answer cannot be passed on: {error}"))
            instead = SynchronizerAnswer(id=answer.id, error=refused)
            self._monitor.answer_synchronizer(SynchronizerAnswers(answers=[instead]))

    def _make_again(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._again if entry[0] <= now]
        self._again = [entry for entry in self._again if entry[0] > now]
        for _, call, since in due:
            self._calls.make(call, since)

    def _answer(self, made: _Made) -> SynchronizerAnswer | None:
        """The answer; None if the call is made again."""
        call, outcome = made.call, made.outcome
        if isinstance(outcome, ray.exceptions.RayActorError):
            now = time.monotonic()
            since = now if made.since is None else made.since
            if now - since < _REBUILD_SECONDS:
                self._again.append((now + _AGAIN_SECONDS, call, since))
                return None
            outcome = WeightsUnavailableError(f"the Synchronizer is gone: {one_sentence(outcome)}")
        elif isinstance(outcome, ray.exceptions.RayTaskError):
            outcome = raised_there(outcome)
        if isinstance(outcome, BaseException):
            return SynchronizerAnswer(id=call.id, error=encode_error(outcome))
        try:
            return SynchronizerAnswer(id=call.id, value=encode_answer(call.method, outcome))
        except ValueError as error:  # of pydantic: it is no answer of that method
            return SynchronizerAnswer(id=call.id, error=encode_error(error))


def _wait(until: Callable[[], bool], deadline: float, seconds: float) -> None:
    """Wait for ``seconds`` at most, and not past ``deadline``."""
    end = min(deadline, time.monotonic() + seconds)
    while not until() and time.monotonic() < end:
        time.sleep(0.02)
