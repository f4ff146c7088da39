"""Only a peer with the attempt's secret takes a place in a chain, and only in that chain."""

import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from trainsync.weights.errors import GroupFailedError
from trainsync.weights.transports.chain.chain import Chain, join_next
from trainsync.weights.transports.chain.receiving import ChainListener

from tests.unit.weights.transports.chain.chains import SECONDS, beside

TOKEN = "secret"


@pytest.fixture
def listener() -> Iterator[ChainListener]:
    listener = ChainListener("127.0.0.1", TOKEN, SECONDS)
    yield listener
    listener.close()


def at(listener: ChainListener) -> tuple[str, int]:
    return "127.0.0.1", listener.port


@pytest.mark.parametrize("first", ["who comes", "who lets in"])
def test_neighbours_with_the_secret_are_joined_in_either_order(
    listener: ChainListener, first: str
) -> None:
    calls = {
        "who comes": lambda: join_next(at(listener), TOKEN, "c", SECONDS),
        "who lets in": lambda: listener.admit("c", SECONDS),
    }
    earlier = beside(calls.pop(first))
    (later,) = calls.values()
    ends = {first: earlier, "other": beside(later)}
    sockets = {name: outcome.get(timeout=SECONDS) for name, outcome in ends.items()}
    assert all(isinstance(end, socket.socket) for end in sockets.values()), sockets
    comes, lets_in = sockets[first], sockets["other"]
    if first == "who lets in":
        comes, lets_in = lets_in, comes
    root = Chain("c", None, comes, SECONDS)
    last = Chain("c", lets_in, None, SECONDS)
    for member in (root, last):
        member.begin_bucket(float("inf"))
    root.carry(memoryview(b"weights"))
    received = bytearray(7)
    last.carry(memoryview(received))
    assert received == b"weights"
    root.close()
    last.close()


def test_a_stranger_takes_no_place_and_blocks_no_neighbour(
    listener: ChainListener,
) -> None:
    silent = socket.create_connection(at(listener))
    with pytest.raises(GroupFailedError, match="does not join"):
        join_next(at(listener), "guessed", "c", 2.0)
    admitted = beside(lambda: listener.admit("c", SECONDS))
    end = join_next(at(listener), TOKEN, "c", SECONDS)
    theirs = admitted.get(timeout=SECONDS)
    assert isinstance(theirs, socket.socket)
    end.sendall(b"x")
    assert theirs.recv(1) == b"x"
    for connection in (silent, end, theirs):
        connection.close()


def test_a_member_of_another_chain_is_not_taken_for_this_one_s(listener: ChainListener) -> None:
    former = beside(lambda: join_next(at(listener), TOKEN, "former", 0.3))
    with pytest.raises(GroupFailedError, match=r"did not come within 0.1 s"):
        listener.admit("new", 0.1)
    assert isinstance(former.get(timeout=SECONDS), GroupFailedError)


def test_a_closed_listener_wakes_waiting_threads_and_accepts_no_connection(
    listener: ChainListener,
) -> None:
    waiting = beside(lambda: listener.admit("c", SECONDS))
    listener.close()
    assert isinstance(waiting.get(timeout=SECONDS), GroupFailedError)
    with pytest.raises(GroupFailedError, match="does not join"):
        join_next(at(listener), TOKEN, "c", 2.0)


def test_a_lack_of_threads_costs_one_connection_and_not_the_listener(
    listener: ChainListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "trainsync-prove":
            raise RuntimeError("can't start new thread")
        genuine(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        for _ in range(20):  # more than prove themselves at once
            with socket.create_connection(at(listener), SECONDS) as turned_away:
                assert turned_away.recv(1) == b"", "it is left waiting"
    admitted = beside(lambda: listener.admit("c", SECONDS))
    end = join_next(at(listener), TOKEN, "c", SECONDS)
    theirs = admitted.get(timeout=SECONDS)
    assert isinstance(theirs, socket.socket), theirs
    end.close()
    theirs.close()


def test_a_neighbour_that_was_reset_before_the_chain_is_made_fails_the_chain() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    other, further = socket.socketpair()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()  # resets
    assert select.select([ours], [], [], SECONDS)[0], "the reset did not come"
    with pytest.raises(GroupFailedError, match="a neighbour is gone"):
        Chain("c", other, ours, SECONDS)
    assert ours.fileno() == other.fileno() == -1, "a connection is left open"
    further.close()
