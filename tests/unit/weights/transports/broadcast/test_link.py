"""The control line: frames come whole, and no call waits longer than it says."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from trainsync.weights.errors import MemberLostError
from trainsync.weights.transports.broadcast.link import (
    MAX_FRAME_BYTES,
    Frame,
    Link,
    TrainerEndpoint,
    connect,
)

SILENCE = 0.4


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the bare other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    link = Link(near, SILENCE)
    with far:
        yield link, far
    link.discard()


def frame_of(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


def test_frames_come_whole_and_in_order(pair: tuple[Link, socket.socket]) -> None:
    link, far = pair
    far.sendall(frame_of(b'{"kind":"a"}') + frame_of(b'{"kind":"b","n":1}')[:9])
    assert link.receive(1.0) == {"kind": "a"}
    assert link.receive(0.01) is None
    far.sendall(frame_of(b'{"kind":"b","n":1}')[9:])
    assert link.receive(1.0) == {"kind": "b", "n": 1}


def test_a_frame_larger_than_the_systems_buffers_passes(pair: tuple[Link, socket.socket]) -> None:
    link, far = pair
    other = Link(far.dup(), SILENCE * 10)
    big: Frame = {"kind": "schema", "text": "x" * 3_000_000}
    sender = threading.Thread(target=other.send, args=(big,))
    sender.start()
    assert link.receive(5.0) == big
    sender.join(5)
    other.discard()


def test_an_ended_connection_is_known_at_once(pair: tuple[Link, socket.socket]) -> None:
    link, far = pair
    far.close()
    started = time.monotonic()
    with pytest.raises(MemberLostError, match="connection ended"):
        link.receive(10.0)
    assert time.monotonic() - started < 5.0


def test_silence_ends_the_link(pair: tuple[Link, socket.socket]) -> None:
    link, _ = pair
    started = time.monotonic()
    assert link.run(lambda _: None) == "it said nothing for 0.4 s"
    assert SILENCE <= time.monotonic() - started < 10.0
    with pytest.raises(MemberLostError, match="it said nothing"):
        link.send({"kind": "a"})


def test_beats_keep_the_link_up_and_frames_are_handed_over(
    pair: tuple[Link, socket.socket],
) -> None:
    link, far = pair
    other = Link(far.dup(), SILENCE)
    threads = [threading.Thread(target=other.run, args=(lambda _: None,), daemon=True)]
    frames: list[Frame] = []
    threads.append(threading.Thread(target=link.run, args=(frames.append,), daemon=True))
    for thread in threads:
        thread.start()
    time.sleep(SILENCE * 3)
    assert threads[1].is_alive(), "beats did not keep it up"
    other.send({"kind": "hello"})
    deadline = time.monotonic() + 5
    while not frames and time.monotonic() < deadline:
        time.sleep(0.01)
    assert frames == [{"kind": "hello"}]
    other.close("the end")
    threads[1].join(5)
    assert not threads[1].is_alive()
    threads[0].join(5)
    other.discard()


class Starved(Link):
    """Its thread is kept waiting, longer than silence may last, whenever nothing was there."""

    def receive(self, seconds: float) -> Frame | None:
        frame = super().receive(seconds)
        if frame is None:
            time.sleep(SILENCE * 1.5)
        return frame


def test_a_thread_that_was_kept_waiting_looks_again_before_it_calls_the_other_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    link = Starved(near, SILENCE)
    causes: list[str] = []
    thread = threading.Thread(target=lambda: causes.append(link.run(lambda _: None)), daemon=True)
    thread.start()
    end = time.monotonic() + SILENCE * 6
    with far:
        while time.monotonic() < end:
            assert causes == []
            time.sleep(SILENCE * 0.7)  # more than its beat, so that it finds nothing at times
            far.sendall(frame_of(b'{"kind":"beat"}'))
        assert causes == []
    thread.join(5)
    assert causes
    link.discard()


def test_a_send_without_a_receiver_ends_at_the_silence_limit(
    pair: tuple[Link, socket.socket],
) -> None:
    link, _ = pair
    started = time.monotonic()
    with pytest.raises(MemberLostError, match="nothing can be sent"):
        link.send({"kind": "a", "text": "x" * 30_000_000})
    assert time.monotonic() - started < 10.0


def test_closing_wakes_waiting_threads(pair: tuple[Link, socket.socket]) -> None:
    link, _ = pair
    threading.Timer(0.1, link.close, args=("enough",)).start()
    with pytest.raises(MemberLostError):
        link.receive(20.0)
    assert link.cause == "enough"


@pytest.mark.parametrize("text", [b"nonsense", b"[1]", b"{}", b'{"kind":3}', b"\xff"])
def test_what_is_no_frame_ends_the_link(pair: tuple[Link, socket.socket], text: bytes) -> None:
    link, far = pair
    far.sendall(frame_of(text))
    with pytest.raises(MemberLostError, match="invalid frame"):
        link.receive(1.0)


def test_a_frame_that_claims_to_be_huge_ends_the_link(pair: tuple[Link, socket.socket]) -> None:
    link, far = pair
    far.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(MemberLostError, match="more than"):
        link.receive(1.0)


def test_a_missing_peer_is_an_error_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(MemberLostError, match=f"attempt 3 cannot be reached at 127.0.0.1:{port}"):
        connect(TrainerEndpoint("127.0.0.1", port, 3), 1.0, SILENCE)
