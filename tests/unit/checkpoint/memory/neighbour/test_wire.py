"""The bytes of a file on their way: whole, or a sentence in time."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainsync.checkpoint.memory.neighbour import wire
from trainsync.checkpoint.memory.neighbour.wire import NeighbourError

MIB = 1 << 20
SECONDS = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection, with bounded calls."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = wire.connect(listener.getsockname())
        other, _ = listener.accept()
    wire.prepare(other)
    with one, other:
        yield one, other


def beside(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "size",
    # What is left for the last pieces may be fewer bytes than the receiver sleeps for.
    [0, 1, MIB // 2, MIB, MIB + 1, 3 * MIB // 2 - 1, 3 * MIB // 2, 2 * MIB, 5 * MIB + 7],
)
def test_files_of_every_length_come_whole_and_end_without_a_wait(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, size: int
) -> None:
    one, other = ends
    data = bytes(index % 251 for index in range(4096)) * (size // 4096 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:size])
    sent: list[int] = []

    def send() -> None:
        with path.open("rb") as file:
            wire.send_file(one, file, size, sent.append)

    thread = beside(send)
    found = bytearray()
    began = time.monotonic()
    wire.receive_file(other, size, found.extend)
    # A receiver that sleeps for bytes which never come would sleep for the whole time of silence.
    assert time.monotonic() - began < wire.SILENCE_SECONDS
    thread.join(SECONDS)
    assert bytes(found) == data[:size]
    assert sum(sent) == size


@pytest.mark.parametrize("left", [1, MIB // 2, MIB, 3 * MIB // 2])
def test_the_last_bytes_are_taken_however_late_they_come(
    ends: tuple[socket.socket, socket.socket], left: int
) -> None:
    one, other = ends
    size = 4 * MIB
    taken, never = threading.Event(), threading.Event()
    found = bytearray()

    def take(piece: memoryview) -> None:
        found.extend(piece)
        if len(found) == (size - left) // MIB * MIB:
            taken.set()

    def send() -> None:
        one.sendall(b"a" * (size - left))
        assert taken.wait(SECONDS)
        for part in range(4):  # what is left, in parts
            never.wait(0.2)  # so that the receiver sleeps by then
            one.sendall(b"b" * ((left + part) // 4))

    thread = beside(send)
    began = time.monotonic()
    wire.receive_file(other, size, take)
    assert time.monotonic() - began < wire.SILENCE_SECONDS
    thread.join(SECONDS)
    assert bytes(found) == b"a" * (size - left) + b"b" * left


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_SILENCE", struct.pack("@ll", 0, 200_000))


@pytest.mark.usefixtures("impatient")
def test_a_sender_that_falls_silent_is_given_up(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    one.sendall(b"a" * 1000)
    with pytest.raises(NeighbourError, match=f"{3 * MIB - 1000} bytes are missing.* silent"):
        wire.receive_file(other, 3 * MIB, lambda _: None)


@pytest.mark.usefixtures("impatient")
def test_a_receiver_that_takes_nothing_is_given_up(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    one, _ = ends
    path = tmp_path / "file"
    with path.open("wb+") as file:
        file.truncate(64 * MIB)  # more than the system holds for a receiver
        with pytest.raises(NeighbourError, match=r"nothing can be sent.* silent"):
            wire.send_file(one, file, 64 * MIB, lambda _: None)


def test_a_sender_that_sends_a_little_at_a_time_is_not_silent(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what comes in the time of silence is less than the receiver sleeps for."""
    monkeypatch.setattr(wire, "_SILENCE", struct.pack("@ll", 2, 0))
    one, other = ends
    size, small = 3 * MIB, MIB // 16
    never = threading.Event()

    def send() -> None:
        for _ in range(5):  # four in the time of silence, half of what the receiver sleeps for
            one.sendall(b"a" * small)
            never.wait(0.5)
        one.sendall(b"a" * (size - 5 * small))

    thread = beside(send)
    found = bytearray()
    wire.receive_file(other, size, found.extend)
    thread.join(SECONDS)
    assert len(found) == size


def test_a_sender_that_dies_says_how_much_is_missing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    one.sendall(b"a" * (MIB + 5))
    one.shutdown(socket.SHUT_RDWR)
    with pytest.raises(NeighbourError, match=f"ended {2 * MIB - 5} bytes early"):
        wire.receive_file(other, 3 * MIB, lambda _: None)


def test_a_file_that_is_shorter_than_was_said_is_told(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1000)
    with path.open("rb") as file, pytest.raises(NeighbourError, match="ends after 1000 of 1001"):
        wire.send_file(ends[0], file, 1001, lambda _: None)
