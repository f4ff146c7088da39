"""The control line between a trainer and an explorer: handshake, heartbeats and commands.

Apart from the collectives, and over plain sockets: a process that is killed is known at once (its
connection ends), one that is stopped or cut off by its silence, and every call has a bound that
holds. A `torch.distributed.TCPStore` gives neither: its calls ignore their timeout when the host is
stopped.

The handshake proves to each side, over both sides' nonces and over its whole frame, that the other
one knows the attempt's secret, so that no recording and no altered frame passes. Until then frames
are short, and are not acted upon. Later frames are neither encrypted nor signed: this is for a
network that does not alter bytes.

A frame is 4 bytes of length (big-endian) and a JSON object with ``kind``::

    trainer   challenge {nonce}
    explorer  hello {name, started, seen_attempt, attempt, version, schema, port, group, nonce,
                     proof}
    trainer   welcome {attempt, proof}, or refused {cause}

The proof is HMAC-SHA256(token, JSON[role, trainer's nonce, explorer's nonce, frame without proof]).
Then come ``prepare``, ``receive``, ``laid``, ``flip``, ``answer`` and ``beat``: ``receive`` names
the way (``chain`` and ``next``; ``group``; ``segment``; ``base`` of a delta).
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trainsync.weights.errors import MemberLostError

Frame = dict[str, Any]

MAX_FRAME_BYTES: Final = 64 << 20
"""More than the schema of any model. A longer frame is not of this protocol."""

MAX_UNPROVEN_BYTES: Final = 4 << 10
"""Of a frame of a side that has not shown the secret."""

_LENGTH: Final = struct.Struct(">I")
_BEAT: Final[Frame] = {"kind": "beat"}
_BEATS_PER_SILENCE: Final = 4
_NONCE_BYTES: Final = 32


@dataclass(frozen=True)
class TrainerEndpoint:
    """The address of a trainer, and the attempt that it belongs to: the fencing number.

    ``token`` is the attempt's secret, which both sides must know; it is not shown.
    """

    host: str
    port: int
    attempt: int
    token: str = field(default="", repr=False)


class Link:
    """One connection that carries JSON frames and beats. `send` may be called by any thread.

    Args:
        connection: connected; belongs to the link from now on.
        silence: seconds without a frame from the other side after which it counts as lost.
    """

    def __init__(self, connection: socket.socket, silence: float) -> None:
        self._socket = connection
        self._silence = silence
        self.limit = MAX_FRAME_BYTES  # of an incoming frame; set by the thread that reads
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(silence)
        self._received = bytearray()
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._cause = ""

    def send(self, frame: Frame) -> None:
        """Write a frame to the socket.

        Raises:
            MemberLostError: the other side is gone, or takes nothing for the time of silence.
        """
        data = json.dumps(frame, separators=(",", ":")).encode()
        with self._sending:
            if self._closed.is_set():
                raise MemberLostError(self._cause)
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError as error:
                self.close(f"nothing can be sent to it: {str(error) or type(error).__name__}")
                raise MemberLostError(self._cause) from error

    def receive(self, seconds: float) -> Frame | None:
        """The next frame, beats too; None if none is complete within ``seconds``.

        Raises:
            MemberLostError: the connection ended, or carries something else.
        """
        deadline = time.monotonic() + seconds
        while (frame := self._take()) is None:
            left = deadline - time.monotonic()
            if self._closed.is_set():
                raise MemberLostError(self._cause)
            try:
                waiting = select.poll()
                waiting.register(self._socket, select.POLLIN)
                ready = waiting.poll(max(0.0, left) * 1000)
                data = self._socket.recv(1 << 16) if ready else None
            except (OSError, ValueError) as error:  # ValueError: closed by another thread
                self.close(f"its connection broke: {error}")
                raise MemberLostError(self._cause) from error
            if data is None:
                return None
            if not data:
                self.close("its connection ended")
                raise MemberLostError(self._cause)
            self._received += data
        return frame

    def run(self, on_frame: Callable[[Frame], None]) -> str:
        """Send beats and give frames to ``on_frame`` until the link ends; returns why it ended."""
        every = self._silence / _BEATS_PER_SILENCE
        heard = beaten = time.monotonic()
        try:
            self.send(_BEAT)
            while True:
                # Taken before looking: a thread that was kept waiting after it looked, or whose
                # process was stopped, must look again before it calls the other side silent.
                now = time.monotonic()
                frame = self.receive(max(0.0, beaten + every - now))
                if frame is not None:
                    heard = time.monotonic()
                    if frame["kind"] != "beat":
                        on_frame(frame)
                elif now - heard > self._silence:
                    self.close(f"it said nothing for {self._silence:g} s")
                if time.monotonic() - beaten >= every:
                    self.send(_BEAT)
                    beaten = time.monotonic()
        except MemberLostError as error:
            return str(error)

    def close(self, cause: str) -> None:
        """End the connection; the first cause stays. Any thread; calls that wait on it return."""
        if not self._closed.is_set():
            self._cause = cause
            self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def discard(self) -> None:
        """Close the socket. Called by the reading thread at its end."""
        self._socket.close()

    def detach(self) -> socket.socket:
        """The connection, for bytes other than frames; the link is over.

        Raises:
            MemberLostError: it is closed already, or carries something that was not read.
        """
        if self._closed.is_set() or self._received:
            raise MemberLostError(self._cause or "it sent more than it was asked for")
        self._cause = "its connection is used for something else"
        self._closed.set()
        return self._socket

    @property
    def here(self) -> str:
        """This side's address."""
        return str(self._socket.getsockname()[0])

    @property
    def peer(self) -> str:
        """The other side's address, as far as it is known."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "an unknown address"

    @property
    def cause(self) -> str:
        """Why it is closed; empty while it is not."""
        return self._cause

    def _take(self) -> Frame | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > self.limit:
            self.close(f"it sent a frame of {length} bytes, more than {self.limit}")
            raise MemberLostError(self._cause)
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        try:
            frame = json.loads(self._received[_LENGTH.size : end])
            if not isinstance(frame, dict) or not isinstance(frame.get("kind"), str):
                raise ValueError("a frame is an object with a kind")
        except ValueError as error:
            self.close(f"it sent an invalid frame: {error}")
            raise MemberLostError(self._cause) from error
        del self._received[:end]
        return frame


def connect(endpoint: TrainerEndpoint, connect_seconds: float, silence: float) -> Link:
    """A link to a trainer.

    Raises:
        MemberLostError: no trainer answers there within ``connect_seconds``.
    """
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), connect_seconds)
    except OSError as error:
        raise MemberLostError(
            f"the trainer of attempt {endpoint.attempt} cannot be reached at "
            f"{endpoint.host}:{endpoint.port}: {error}"
        ) from error
    return Link(connection, silence)


class NotProvenError(Exception):
    """The other side does not know the secret, or speaks another protocol; says which."""


def new_token() -> str:
    """A secret for one attempt."""
    return secrets.token_hex(32)


class Challenge:
    """The trainer's half, for one connection.

    Args:
        token: the secret, not empty; or a function of the hello, unproven yet, that returns it.
    """

    def __init__(self, link: Link, token: str | Callable[[Frame], str]) -> None:
        link.limit = MAX_UNPROVEN_BYTES
        self._link = link
        self._tell = token if callable(token) else lambda _: token
        self._token = ""
        self._nonces = (secrets.token_hex(_NONCE_BYTES), "")

    def hello(self, seconds: float) -> Frame:
        """Ask the explorer for its hello, and check its proof.

        Raises:
            NotProvenError: the proof is missing or wrong.
            MemberLostError: the connection ended, or carries something else.
        """
        self._link.send({"kind": "challenge", "nonce": self._nonces[0]})
        hello = _next(self._link, "hello", time.monotonic() + seconds, seconds)
        self._nonces = (self._nonces[0], str(hello.get("nonce")))
        self._token = self._tell(hello)
        _check(self._token, "explorer", self._nonces, hello)
        return hello

    def welcome(self, frame: Frame) -> None:
        """Accept the explorer, and prove the secret to it.

        Raises:
            MemberLostError: the explorer is gone.
        """
        self._link.limit = MAX_FRAME_BYTES
        self._link.send(_proven(self._token, "trainer", self._nonces, frame))


def introduce(link: Link, token: str, hello: Frame, seconds: float) -> Frame:
    """The explorer's half: say ``hello`` (of any kind of content), return the trainer's welcome.

    Raises:
        NotProvenError: the trainer refuses, or has not proven itself.
        MemberLostError: the connection ended, or carries something else.
    """
    deadline = time.monotonic() + seconds
    link.limit = MAX_UNPROVEN_BYTES
    theirs = str(_next(link, "challenge", deadline, seconds).get("nonce"))
    nonces = (theirs, secrets.token_hex(_NONCE_BYTES))
    link.send(_proven(token, "explorer", nonces, {**hello, "kind": "hello", "nonce": nonces[1]}))
    welcome = _next(link, "welcome", deadline, seconds)
    _check(token, "trainer", nonces, welcome)
    link.limit = MAX_FRAME_BYTES
    return welcome


def _next(link: Link, kind: str, deadline: float, seconds: float) -> Frame:
    """The next frame until ``deadline``; ``seconds`` is the whole limit, for the message."""
    while (frame := link.receive(max(0.0, deadline - time.monotonic()))) is not None:
        if frame["kind"] == "refused":
            raise NotProvenError(f"it was refused: {str(frame.get('cause'))[:400]}")
        if frame["kind"] != "beat":
            break
    if frame is None:
        raise NotProvenError(f"no {kind} came within {seconds:.3g} s")
    if frame["kind"] != kind:
        raise NotProvenError(f"a frame of kind {frame['kind']!r} came; expected {kind!r}")
    return frame


def _proven(token: str, role: str, nonces: tuple[str, str], frame: Frame) -> Frame:
    return {**frame, "proof": _proof(token, role, nonces, frame)}


def _check(token: str, role: str, nonces: tuple[str, str], frame: Frame) -> None:
    said = {key: value for key, value in frame.items() if key != "proof"}
    proof = str(frame.get("proof")).encode(errors="replace")
    if not hmac.compare_digest(proof, _proof(token, role, nonces, said).encode()):
        raise NotProvenError(f"the {role} does not know the secret of this attempt")


def _proof(token: str, role: str, nonces: tuple[str, str], frame: Mapping[str, Any]) -> str:
    said = json.dumps([role, *nonces, frame], sort_keys=True, separators=(",", ":"))
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()
