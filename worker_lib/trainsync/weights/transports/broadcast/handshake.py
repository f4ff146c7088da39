"""The handshake: trainer and explorer prove to each other that they know the attempt's secret.

Each side proves it over both sides' nonces and over its whole frame, so that no recording and no
altered frame passes. Until then frames are short, and are not acted upon. Later frames are neither
encrypted nor signed: this is for a network that does not alter bytes.
"""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from trainsync.weights.transports.broadcast.link import MAX_FRAME_BYTES, Frame, Link

MAX_UNPROVEN_BYTES: Final = 4 << 10
"""Of a frame of a side that has not shown the secret."""

_NONCE_BYTES: Final = 32


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
