"""Handshake: a peer without the secret is refused, as client and as server."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from trainsync.weights.errors import MemberLostError
from trainsync.weights.transports.broadcast import members as members_module
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.link import (
    MAX_FRAME_BYTES,
    MAX_UNPROVEN_BYTES,
    Challenge,
    Frame,
    Link,
    NotProvenError,
    TrainerEndpoint,
    connect,
    introduce,
    new_token,
)
from trainsync.weights.transports.broadcast.members import Members

from tests.unit.weights.transports.chain.chains import beside
from tests.waiting import eventually

DEADLINES = Deadlines(whole=30.0, bucket=5.0, connect=5.0, silence=5.0)
HELLO: Frame = {
    "name": "e",
    "seen_attempt": -1,
    "attempt": -1,
    "version": -1,
    "schema": None,
    "started": 1,
    "port": 1,
}


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    """The trainer's end and the explorer's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    pair = Link(near, 5.0), Link(far, 5.0)
    yield pair
    for link in pair:
        link.discard()


def test_a_peer_with_the_secret_is_accepted_and_may_send_long_frames(
    links: tuple[Link, Link],
) -> None:
    trainer, explorer = links
    token = new_token()
    welcome = beside(lambda: introduce(explorer, token, HELLO, 5.0))
    challenge = Challenge(trainer, token)
    assert trainer.limit == MAX_UNPROVEN_BYTES
    hello = challenge.hello(5.0)
    assert {key: hello[key] for key in HELLO} == HELLO
    challenge.welcome({"kind": "welcome", "attempt": 3})
    assert welcome.get(timeout=30.0)["attempt"] == 3
    assert trainer.limit == explorer.limit == MAX_FRAME_BYTES


def test_a_handshake_that_ends_too_late_says_how_long_it_had(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, explorer = links
    trainer.send({"kind": "challenge", "nonce": "n"})
    monkeypatch.setattr(explorer, "send", lambda frame: time.sleep(0.1))  # the wire is full
    with pytest.raises(NotProvenError, match=r"no welcome came within 0\.05 s"):
        introduce(explorer, "token", HELLO, 0.05)


def test_an_explorer_with_another_secret_is_not_believed(links: tuple[Link, Link]) -> None:
    trainer, explorer = links
    beside(lambda: introduce(explorer, "wrong", HELLO, 5.0))
    with pytest.raises(NotProvenError, match="explorer does not know the secret"):
        Challenge(trainer, "right").hello(5.0)


def test_a_trainer_with_another_secret_is_not_believed(links: tuple[Link, Link]) -> None:
    trainer, explorer = links
    outcome = beside(lambda: introduce(explorer, "right", HELLO, 5.0))
    trainer.send({"kind": "challenge", "nonce": "n"})
    assert trainer.receive(5.0) is not None
    trainer.send({"kind": "welcome", "attempt": 0, "proof": "0" * 64})
    error = outcome.get(timeout=30.0)
    assert isinstance(error, NotProvenError)
    assert "trainer does not know the secret" in str(error)


@pytest.mark.parametrize(
    ("field", "value"), [("version", 7), ("name", "other"), ("nonce", "x"), ("proof", None)]
)
def test_a_frame_that_was_altered_or_recorded_is_not_believed(
    links: tuple[Link, Link], field: str, value: object
) -> None:
    trainer, explorer = links

    def altered() -> None:
        genuine = explorer.send
        explorer.send = lambda frame: genuine({**frame, field: value})  # type: ignore[method-assign]
        introduce(explorer, "token", HELLO, 5.0)

    beside(altered)
    with pytest.raises(NotProvenError, match="does not know the secret"):
        Challenge(trainer, "token").hello(5.0)


def test_a_proof_of_one_side_is_none_of_the_other(links: tuple[Link, Link]) -> None:
    trainer, explorer = links
    outcome = beside(lambda: introduce(explorer, "token", HELLO, 5.0))
    trainer.send({"kind": "challenge", "nonce": "n"})
    hello = trainer.receive(5.0)
    assert hello is not None
    trainer.send({**hello, "kind": "welcome"})  # its own words, sent back
    assert isinstance(outcome.get(timeout=30.0), NotProvenError)


def test_a_long_frame_of_a_stranger_ends_the_connection(links: tuple[Link, Link]) -> None:
    trainer, explorer = links
    outcome = beside(lambda: Challenge(trainer, "token").hello(5.0))
    explorer.send({"kind": "hello", "text": "x" * MAX_UNPROVEN_BYTES})
    error = outcome.get(timeout=30.0)
    assert isinstance(error, MemberLostError)
    assert "more than 4096" in str(error)


def test_a_stranger_that_says_nothing_costs_only_the_deadline(links: tuple[Link, Link]) -> None:
    trainer, _ = links
    with pytest.raises(NotProvenError, match=r"no hello came within 0.05 s"):
        Challenge(trainer, "token").hello(0.05)


@pytest.fixture
def members() -> Iterator[Members]:
    members = Members(4, "127.0.0.1", 0, DEADLINES, "right")
    yield members
    members.close()


def wrong(endpoint: TrainerEndpoint) -> TrainerEndpoint:
    return TrainerEndpoint(endpoint.host, endpoint.port, endpoint.attempt, "wrong")


def greet(endpoint: TrainerEndpoint, hello: Frame) -> Frame:
    link = connect(endpoint, 5.0, 5.0)
    try:
        return introduce(link, endpoint.token, hello, 5.0)
    finally:
        link.close("the test is over")
        link.discard()


def test_strangers_are_counted_and_can_neither_depose_nor_replace(members: Members) -> None:
    link = connect(members.endpoint, 5.0, 5.0)
    introduce(link, "right", HELLO, 5.0)
    assert members.wait(lambda: len(members.connected()) == 1, 5.0)
    before = members.connected()
    for hello in (HELLO, {**HELLO, "seen_attempt": 9}):
        with pytest.raises(NotProvenError, match="refused: the explorer does not know the secret"):
            greet(wrong(members.endpoint), hello)
    assert members.refused_connections == 2
    assert members.newer_attempt is None
    assert members.connected() == before
    link.discard()


def test_an_explorer_that_follows_a_newer_attempt_is_told_and_deposes(members: Members) -> None:
    with pytest.raises(NotProvenError, match="attempt 9 has taken over"):
        greet(members.endpoint, {**HELLO, "seen_attempt": 9})
    assert members.newer_attempt == 9
    assert members.refused_connections == 0


def test_connections_that_prove_nothing_are_refused_beyond_a_number(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "_MAX_UNPROVEN", 2)
    silent = [connect(members.endpoint, 5.0, 5.0) for _ in range(2)]
    for link in silent:
        assert link.receive(5.0) is not None  # the challenge
    with pytest.raises(MemberLostError):
        greet(members.endpoint, HELLO)
    assert members.refused_connections == 1
    for link in silent:
        link.close("it goes")
        link.discard()
    eventually(lambda: members.refused_connections == 3, 30.0)  # nothing was proven
    assert greet(members.endpoint, HELLO)["attempt"] == 4
    assert greet(members.endpoint, HELLO)["attempt"] == 4
    assert greet(members.endpoint, HELLO)["attempt"] == 4, "who is taken in does not count"


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_is_taken_in(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "trainsync-member":
            raise RuntimeError("can't start new thread")
        genuine(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        patch.setattr(members_module, "_MAX_UNPROVEN", 1)
        for _ in range(2):
            with pytest.raises(MemberLostError):
                greet(members.endpoint, HELLO)
    assert members.refused_connections == 0
    assert greet(members.endpoint, HELLO)["attempt"] == 4


def test_a_peer_that_authenticates_during_close_is_not_accepted(members: Members) -> None:
    link = connect(members.endpoint, 5.0, 5.0)
    genuine = link.send

    def send(frame: Frame) -> None:
        members.close()
        genuine(frame)

    link.send = send  # type: ignore[method-assign]
    introduce(link, "right", HELLO, 5.0)
    with pytest.raises(MemberLostError):
        link.receive(5.0)
    assert members.connected() == []
    link.discard()


def test_the_secret_is_not_shown() -> None:
    assert "hush" not in repr(TrainerEndpoint("host", 1, 0, "hush"))
