"""The Synchronizer by way of the monitor: what travels, and what is raised."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api.protocol import (
    CallError,
    SynchronizerAnswers,
    SynchronizerCall,
    SynchronizerCalls,
    SynchronizerReply,
)
from trainsync.monitor.errors import FencedError, InvalidRequestError, MonitorUnavailableError
from trainsync.weights import errors
from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import ExplorerLostError, WeightsError, WeightsUnavailableError
from trainsync.weights.synchronizer import remote
from trainsync.weights.synchronizer.followed_state import Contact
from trainsync.weights.synchronizer.remote import RemoteConnection, RemoteSynchronizer
from trainsync.weights.synchronizer.remote_calls import (
    decode_answer,
    decode_arguments,
    decode_error,
    encode_answer,
    encode_arguments,
    encode_error,
)
from trainsync.weights.synchronizer.roster import Serving
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import CheckpointLocation, Published

versions = st.integers(-1, 2**53)
taken = st.dictionaries(st.sampled_from(TransferKind), st.integers(0, 2**60))
servings = st.builds(Serving, versions, st.text(), taken)


@given(st.text(), st.text(), st.none() | servings, st.booleans())
def test_arguments_come_as_they_were_sent(
    explorer: str, session: str, serving: Serving | None, ready: bool
) -> None:
    arguments = [explorer, session, serving, ready]
    call = SynchronizerCall(
        id="01234567", method="renew", arguments=encode_arguments("renew", arguments)
    )
    travelled = SynchronizerCall.model_validate_json(call.model_dump_json(by_alias=True))
    found = decode_arguments("renew", travelled.arguments)
    assert found == arguments
    assert serving is None or found[2].taken == serving.taken  # which is not compared


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("get_contact", Contact("run/0", True, 30.0)),
        ("get_weight_sync_group", None),
        ("get_weight_sync_group", TrainerEndpoint("10.0.0.1", 4711, 3, "secret")),
        ("wait_new_model_state_dict", None),
        ("wait_new_model_state_dict", 7),
        ("renew", None),
        ("get_model_state_dict", Published.broadcast(7, "nh-128:00", 12)),
        (
            "get_model_state_dict",
            Published.saved(7, "sha256:00", 12, CheckpointLocation("a", "sha256:00", 1, 7)),
        ),
    ],
)
def test_answers_come_as_they_were_given(method: str, answer: Any) -> None:
    reply = SynchronizerReply(done=True, value=encode_answer(method, answer))
    travelled = SynchronizerReply.model_validate(reply.to_json_dict())
    assert decode_answer(method, travelled.value) == answer


def test_calls_of_an_earlier_release_are_of_before_any_restart() -> None:
    serving = {"version": 7, "digest": "d", "taken": {}}
    renewed = decode_arguments("renew", ["e", "s", serving, False])
    assert renewed[2] == Serving(7, "d", restarts=0)
    assert decode_arguments("acknowledge", ["e", "s", 7, "d", None]) == ["e", "s", 7, "d", None]
    meta = {"version": 7, "digest": "d", "parts": [], "method": "nccl", "bytes": 1}
    answer = decode_answer("get_model_state_dict", {"meta": meta, "payloads": [], "location": None})
    assert answer == Published.broadcast(7, "d", 1)


def test_errors_keep_their_class_and_their_sentence() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, WeightsError):
            found = decode_error(encode_error(kind("version 7 is gone")))
            assert type(found) is kind
            assert str(found) == "version 7 is gone"
    assert type(decode_error(encode_error(ValueError("no")))) is ValueError
    other = decode_error(encode_error(KeyError("x" * 9000)))
    assert type(other) is WeightsError
    assert str(other).startswith("KeyError: ")
    assert str(decode_error(CallError(kind="NewerError", message="said"))) == "said"


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("set_model_state_dict", [[], 1]), ("leave", ["e", "s", "more"]), ("__init__", [])],
)
def test_what_is_not_for_explorers_of_another_cluster_is_refused(
    method: str, arguments: list[Any]
) -> None:
    for code in (encode_arguments, decode_arguments):
        with pytest.raises(WeightsError, match="not for explorers of another Ray cluster"):
            code(method, arguments)
    with pytest.raises(WeightsError, match="other arguments"):
        decode_arguments("renew", ["e", {"not": "a session"}])


class Monitor:
    """Answers each request by the next of ``answers``."""

    def __init__(self, *answers: SynchronizerReply | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[SynchronizerCall] = []

    def call_synchronizer(
        self, call: SynchronizerCall, wait_seconds: float = 0.0
    ) -> SynchronizerReply:
        self.asked.append(call)
        answer = self.answers.pop(0) if self.answers else OPEN
        if isinstance(answer, Exception):
            raise answer
        return answer

    def synchronizer_calls(
        self, epoch: str, after: int, wait_seconds: float = 0.0
    ) -> SynchronizerCalls:
        raise AssertionError("an explorer answers no calls")

    def answer_synchronizer(self, answers: SynchronizerAnswers) -> None:
        raise AssertionError("an explorer answers no calls")


OPEN = SynchronizerReply(done=False)
AWAY = MonitorUnavailableError("no connection")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.001)


def wait(monitor: Monitor, give_up: Callable[[], bool] | None = None, timeout: float = 30) -> Any:
    return RemoteSynchronizer(monitor).call(
        "wait_new_model_state_dict", 6, 600.0, "e", "s", timeout=timeout, give_up=give_up
    )


def test_the_same_call_is_made_again_while_it_is_open_or_the_monitor_is_away() -> None:
    monitor = Monitor(OPEN, AWAY, OPEN, SynchronizerReply(done=True, value=7))
    assert wait(monitor) == 7
    assert len({call.id for call in monitor.asked}) == 1
    assert len(monitor.asked) == 4


def test_what_the_method_raised_is_raised() -> None:
    error = CallError(kind="ExplorerLostError", message="it was silent")
    with pytest.raises(ExplorerLostError, match="it was silent"):
        wait(Monitor(SynchronizerReply(done=True, error=error)))


def test_an_attempt_that_is_over_ends_the_call_at_once() -> None:
    monitor = Monitor(FencedError("attempt 1 is in force"))
    synchronizer = RemoteSynchronizer(monitor)
    with pytest.raises(FencedError):
        synchronizer.call("get_contact", timeout=30)
    assert len(monitor.asked) == 1
    assert synchronizer.over


def test_a_refusal_of_the_monitor_is_an_error_of_weights() -> None:
    with pytest.raises(WeightsUnavailableError, match=r"does not pass on .*too long"):
        wait(Monitor(InvalidRequestError("too long")))


@pytest.mark.parametrize(("answer", "cause"), [(OPEN, "said nothing"), (AWAY, "no connection")])
def test_a_call_ends_at_its_deadline_with_the_cause(
    answer: SynchronizerReply | Exception, cause: str
) -> None:
    with pytest.raises(WeightsUnavailableError, match=f"within 0.02 s: .*{cause}"):
        wait(Monitor(*[answer] * 9999), timeout=0.02)


def test_a_wait_that_is_given_up_has_no_answer() -> None:
    asked = iter([False, False, True])
    monitor = Monitor(OPEN, OPEN)
    assert wait(monitor, lambda: next(asked)) is None
    assert len(monitor.asked) == 3


def test_a_connection_knows_the_lease_of_the_synchronizer() -> None:
    contact = encode_answer("get_contact", Contact("run/0", True, 30.0))
    connection = RemoteConnection(
        RemoteSynchronizer(Monitor(SynchronizerReply(done=True, value=contact))), 30
    )
    assert connection.contact.lease_seconds == 30.0
    assert connection.lasts()
    assert connection.call("leave", "e", "s", timeout=0.01) is None  # the trainers may have ended
    with pytest.raises(WeightsError, match="not for explorers of another"):
        connection.call("announce", timeout=1)
