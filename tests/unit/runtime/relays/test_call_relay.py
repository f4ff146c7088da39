"""`CallRelay`: each call of an explorer elsewhere is answered, whatever happens. No Ray."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from trainsync.api.protocol import (
    SynchronizerAnswer,
    SynchronizerAnswers,
    SynchronizerCall,
    SynchronizerCalls,
    SynchronizerReply,
)
from trainsync.monitor.errors import InvalidRequestError
from trainsync.runtime.relays import call_relay
from trainsync.runtime.relays.call_relay import CallRelay
from trainsync.weights import threads
from trainsync.weights.synchronizer.followed_state import Contact

from tests.waiting import eventually


class Monitor:
    """Gives calls, and keeps answers; refuses those to the calls in ``refused``."""

    def __init__(self) -> None:
        self.calls: list[SynchronizerCall] = []
        self.answers: dict[str, SynchronizerAnswer] = {}
        self.refused: set[str] = set()

    def ask(self, number: int, method: str = "get_contact", *arguments: Any) -> str:
        call = SynchronizerCall(id=f"{number:08}", method=method, arguments=list(arguments))
        self.calls.append(call)
        return call.id

    def call_synchronizer(
        self, call: SynchronizerCall, wait_seconds: float = 0.0
    ) -> SynchronizerReply:
        raise AssertionError("the relay calls nothing")

    def synchronizer_calls(
        self, epoch: str, after: int, wait_seconds: float = 0.0
    ) -> SynchronizerCalls:
        if after >= len(self.calls):
            time.sleep(0.01)
        new = self.calls[after:]
        return SynchronizerCalls(epoch="e", last=after + len(new), calls=new)

    def answer_synchronizer(self, answers: SynchronizerAnswers) -> None:
        if any(answer.id in self.refused and not answer.error for answer in answers.answers):
            raise InvalidRequestError("no such answer")
        self.answers |= {answer.id: answer for answer in answers.answers}


class Actor:
    """Answers each call by the next of ``outcomes``."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []
        self.outcome: Callable[[], Any] | None = lambda: Contact("run/0", True, 30.0)

    def __getattr__(self, method: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> "Actor":
        future: Future[Any] = Future()
        self.futures.append(future)
        if self.outcome is not None:
            future.set_result(self.outcome())
        return self

    def future(self) -> "Future[Any]":
        return self.futures[-1]


@pytest.fixture
def monitor() -> Monitor:
    return Monitor()


@pytest.fixture
def actor() -> Actor:
    return Actor()


@pytest.fixture
def relay(monitor: Monitor, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> Iterator[CallRelay]:
    monkeypatch.setattr(threads, "ray_is_there", lambda: True)
    made = CallRelay(monitor, lambda: actor)
    yield made
    made.close(5.0)


def test_a_call_that_waited_long_before_the_actor_died_is_made_again(
    monitor: Monitor, actor: Actor, relay: CallRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_relay, "_REBUILD_SECONDS", 3.0)
    actor.outcome = None
    asked = monitor.ask(1)
    eventually(lambda: len(actor.futures) == 1)
    time.sleep(3.1)  # longer than a rebuilding may take
    actor.futures[0].set_exception(ray.exceptions.ActorDiedError())
    eventually(lambda: len(actor.futures) == 2)
    actor.futures[1].set_result(Contact("run/0", True, 30.0))
    eventually(lambda: asked in monitor.answers)
    assert monitor.answers[asked].error is None


def test_a_caller_hears_of_an_actor_that_stays_away(
    monitor: Monitor, actor: Actor, relay: CallRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_relay, "_REBUILD_SECONDS", 0.0)
    actor.outcome = None
    asked = monitor.ask(1)
    eventually(lambda: len(actor.futures) == 1)
    actor.futures[0].set_exception(ray.exceptions.ActorDiedError())
    eventually(lambda: asked in monitor.answers)
    error = monitor.answers[asked].error
    assert error is not None
    assert error.kind == "WeightsUnavailableError"


def test_an_answer_that_cannot_be_passed_on_holds_up_no_other(
    monitor: Monitor, actor: Actor, relay: CallRelay
) -> None:
    monitor.refused = {"00000002"}
    asked = [monitor.ask(number) for number in (1, 2, 3)]
    eventually(lambda: set(asked) <= set(monitor.answers))
    errors = [monitor.answers[each].error for each in asked]
    assert [error is None for error in errors] == [True, False, True]


def test_a_call_that_is_for_no_explorer_elsewhere_is_answered_with_an_error(
    monitor: Monitor, actor: Actor, relay: CallRelay
) -> None:
    actor.outcome = lambda: object()
    strange, wrong = monitor.ask(1, "set_trainer_status", "stopped"), monitor.ask(2)
    eventually(lambda: {strange, wrong} <= set(monitor.answers))
    assert all(monitor.answers[each].error for each in (strange, wrong))
    assert len(actor.futures) == 1, "the actor was not called"


@pytest.mark.parametrize("ended", [True, False])
def test_after_training_explorers_get_a_moment_to_leave(
    ended: bool,
    monitor: Monitor,
    actor: Actor,
    relay: CallRelay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay._calls, "training_ended", lambda: ended)
    actor.outcome = lambda: 7
    registered = monitor.ask(1, "register_explorer", "far", "s")
    eventually(lambda: registered in monitor.answers)
    closed = threading.Event()

    def close() -> None:
        relay.close(15.0)
        closed.set()

    actor.outcome = lambda: None
    thread = threading.Thread(target=close)
    thread.start()
    if ended:
        assert not closed.wait(0.3)
        left = monitor.ask(2, "leave", "far", "s")
        assert closed.wait(15)
        assert left in monitor.answers
    assert closed.wait(15)
    thread.join()
