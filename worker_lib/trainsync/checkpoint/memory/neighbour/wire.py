"""Messages between two processes of a run: a proof that each knows the run's key, then bytes.

A frame is 4 bytes of length (big-endian) and a JSON object with ``kind``. A connection carries one
request::

    server  challenge {nonce}
    client  hello {version, want: get, digest, nonce, proof}
            hello {version, want: put, attempt, incarnation, step, component, rank, bytes, digest,
                   about, about_digest, nonce, proof}
    server  welcome {bytes, proof}, or refused {cause}
            then the file's bytes: of a get from the server, of a put from the client, which sends
            ``about`` more bytes: `trainsync.checkpoint.rescue.messages.AboutCopy`, of that digest
    server  kept {}, or refused {cause}: after a put

The proof is HMAC-SHA256(key, JSON[role, server's nonce, client's nonce, frame without proof]). The
bytes are neither encrypted nor signed, as those of the weights: the digest shows what went wrong on
the way, and the network is trusted not to alter them on purpose.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final, Literal

from trainsync.checkpoint.errors import CheckpointError

Frame = dict[str, Any]
Side = Literal["server", "client"]

VERSION: Final = 2
SILENCE_SECONDS: Final = 10.0
"""A side that neither sends nor takes a byte for so long is given up."""

LONGEST_ABOUT: Final = 16 << 20
"""Bytes that may follow a file."""

_MAX_FRAME: Final = 4 << 10
_LENGTH: Final = struct.Struct(">I")
_NONCE_BYTES: Final = 32
_PIECE: Final = 1 << 20
_SILENCE: Final = struct.pack("@ll", int(SILENCE_SECONDS), 0)  # the system's `timeval`
_MAX_CAUSE: Final = 400
_HANDSHAKE_SECONDS: Final = 10.0


class NeighbourError(CheckpointError):
    """Another process did not give or take a file; says why."""


def connect(address: tuple[str, int], seconds: float = SILENCE_SECONDS) -> socket.socket:
    """A connection to a server.

    Raises:
        NeighbourError: nothing answers there in time.
    """
    try:
        connection = socket.create_connection(address, seconds)
    except OSError as error:
        raise NeighbourError(f"{address[0]}:{address[1]} cannot be reached: {error}") from error
    prepare(connection)
    return connection


def prepare(connection: socket.socket) -> None:
    """Bound every call of the connection in time."""
    connection.settimeout(SILENCE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def ask(connection: socket.socket, key: bytes, request: Mapping[str, Any]) -> Frame:
    """The client's half of the handshake; returns the server's welcome.

    Raises:
        NeighbourError: it refuses, or does not prove that it knows the key.
    """
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    challenge = receive(connection, "challenge", deadline)
    nonces = (str(challenge.get("nonce")), secrets.token_hex(_NONCE_BYTES))
    hello = {**request, "kind": "hello", "version": VERSION, "nonce": nonces[1]}
    send(connection, _proven(key, "client", nonces, hello))
    welcome = receive(connection, "welcome", deadline)
    _check(key, "server", nonces, welcome)
    return welcome


class Caller:
    """The server's half, of one connection."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._connection = connection
        self._key = key
        self._nonces = (secrets.token_hex(_NONCE_BYTES), "")

    def request(self) -> Frame:
        """The proven hello.

        Raises:
            NeighbourError: the client does not know the key, or speaks otherwise.
        """
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        send(self._connection, {"kind": "challenge", "nonce": self._nonces[0]})
        hello = receive(self._connection, "hello", deadline)
        self._nonces = (self._nonces[0], str(hello.get("nonce")))
        _check(self._key, "client", self._nonces, hello)
        if hello.get("version") != VERSION:
            raise NeighbourError(f"the version is {hello.get('version')}, expected {VERSION}")
        return hello

    def welcome(self, **fields: Any) -> None:
        """Grant the request. Raises `NeighbourError`: the client is gone."""
        frame = {**fields, "kind": "welcome"}
        send(self._connection, _proven(self._key, "server", self._nonces, frame))

    def refuse(self, cause: str) -> None:
        """Refuse the request, or what came of it. Raises `NeighbourError`: the client is gone."""
        send(self._connection, {"kind": "refused", "cause": cause[:_MAX_CAUSE]})


def send(connection: socket.socket, frame: Mapping[str, Any]) -> None:
    """Raises `NeighbourError`: the other side is gone."""
    data = json.dumps(frame, separators=(",", ":")).encode()
    try:
        connection.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise NeighbourError(f"nothing can be sent: {_text(error)}") from error


def receive(connection: socket.socket, kind: str, deadline: float | None = None) -> Frame:
    """The next frame, of that kind.

    Args:
        deadline: of `time.monotonic`; None: `SILENCE_SECONDS` from now.

    Raises:
        NeighbourError: the other side refuses, says something else, or is gone.
    """
    deadline = time.monotonic() + SILENCE_SECONDS if deadline is None else deadline
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if length > _MAX_FRAME:
        raise NeighbourError(f"a frame of {length} bytes came, more than {_MAX_FRAME}")
    try:
        frame = json.loads(_exactly(connection, length, deadline))
    except ValueError as error:
        raise NeighbourError(f"a frame came that is not JSON: {error}") from error
    found = frame.get("kind") if isinstance(frame, dict) else None
    if found == "refused":
        raise NeighbourError(f"it was refused: {str(frame.get('cause'))[:_MAX_CAUSE]}")
    if found != kind:
        raise NeighbourError(f"a frame of kind {found!r} came; expected {kind!r}")
    return dict(frame)


def send_file(
    connection: socket.socket, file: BinaryIO, size: int, sent: Callable[[int], None]
) -> None:
    """Send the file's first ``size`` bytes, without a copy through this process.

    Args:
        sent: gets the bytes of each piece after it was sent.

    Raises:
        NeighbourError: the other side is gone, or takes nothing, or the file ends early.
    """
    _wait_in_the_system(connection)
    done = 0
    while done < size:
        try:
            # Not by `socket.sendfile`, which waits in Python for every part of a piece.
            count = os.sendfile(connection.fileno(), file.fileno(), done, min(_PIECE, size - done))
        except OSError as error:
            raise NeighbourError(f"nothing can be sent: {_text(error)}") from error
        if count == 0:
            raise NeighbourError(f"the file ends after {done} of {size} bytes")
        done += count
        sent(count)


def send_bytes(connection: socket.socket, data: bytes) -> None:
    """Send ``data`` after a file. Raises `NeighbourError`: the other side is gone, or silent."""
    try:
        connection.sendall(data)
    except OSError as error:
        raise NeighbourError(f"nothing can be sent: {_text(error)}") from error


def receive_file(connection: socket.socket, size: int, take: Callable[[memoryview], None]) -> None:
    """Receive ``size`` bytes.

    Args:
        take: gets each piece, whose memory is used again.

    Raises:
        NeighbourError: the other side is gone, or silent.
        What ``take`` raises.
    """
    _wait_in_the_system(connection)
    buffer = memoryview(bytearray(min(_PIECE, size)))
    left = size
    while left:
        filled = 0
        while filled < min(len(buffer), left):
            try:
                count = connection.recv_into(buffer[filled : min(len(buffer), left)])
            except OSError as error:
                raise NeighbourError(
                    f"{left - filled} bytes are missing: {_text(error)}"
                ) from error
            if count == 0:
                raise NeighbourError(f"its connection ended {left - filled} bytes early")
            filled += count
        take(buffer[:filled])
        left -= filled


def _wait_in_the_system(connection: socket.socket) -> None:
    """Bound each call in time by the system, not by Python, which wakes for every few packets."""
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _SILENCE)


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = bytearray()
    try:
        while len(found) < size:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = connection.recv(size - len(found))
            if not piece:
                raise NeighbourError("its connection ended")
            found += piece
        connection.settimeout(SILENCE_SECONDS)
    except OSError as error:
        raise NeighbourError(f"no answer came: {_text(error)}") from error
    return bytes(found)


def _proven(key: bytes, side: Side, nonces: tuple[str, str], frame: Frame) -> Frame:
    return {**frame, "proof": _proof(key, side, nonces, frame)}


def _check(key: bytes, side: Side, nonces: tuple[str, str], frame: Frame) -> None:
    said = {name: value for name, value in frame.items() if name != "proof"}
    proof = str(frame.get("proof")).encode(errors="replace")
    if not hmac.compare_digest(proof, _proof(key, side, nonces, said).encode()):
        raise NeighbourError(f"the {side} does not know the key of this run")


def _proof(key: bytes, side: Side, nonces: tuple[str, str], frame: Frame) -> str:
    said = json.dumps([side, *nonces, frame], sort_keys=True, separators=(",", ":"))
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()


def _text(error: OSError) -> str:
    if isinstance(error, BlockingIOError):  # as the system says that the time is over
        return f"the other side was silent for {SILENCE_SECONDS:.0f} s"
    return str(error) or type(error).__name__
