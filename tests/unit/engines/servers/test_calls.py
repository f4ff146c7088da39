"""Every call ends by its deadline, whatever the server does with its connection."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import ServerError

_SECONDS = 0.5
_LATEST = 5.0  # on a busy machine


@contextmanager
def dripping(whole: bytes) -> Iterator[str]:
    """A server that sends a byte of its answer every tenth of a second."""
    over = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(65536)
            for place in range(len(whole)):
                connection.sendall(whole[place : place + 1])
                if over.wait(0.1):
                    return

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        over.set()
        thread.join(10)
        listening.close()


@pytest.mark.parametrize(
    "whole",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"x" * 1000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000,
        b"HTTP/1.1 200 OK\r\n" + b"\r\n{}" * 300,
    ],
    ids=["head", "body", "without-length"],
)
def test_an_answer_that_comes_in_drops_is_not_waited_for(whole: bytes) -> None:
    with dripping(whole) as url:
        calls = ServerCalls(url)
        began = time.monotonic()
        with pytest.raises(ServerError, match="did not answer within"):
            calls.ask("GET", "/weight_info", began + _SECONDS)
        assert time.monotonic() - began < _LATEST
        calls.close()


def test_a_slow_answer_in_time_is_taken() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with dripping(whole) as url:
        calls = ServerCalls(url)
        assert calls.ask("GET", "/weight_info", time.monotonic() + 60) == {}
        calls.close()
