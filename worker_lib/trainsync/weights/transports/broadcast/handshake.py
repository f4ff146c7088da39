"""A trainer and an explorer show each other that they know the attempt's secret, before all else.

Each side proves it over both sides' nonces and over its whole frame, so that no recording and no
altered frame passes. Until then frames are short, and nothing that they say is acted upon. What
follows is neither encrypted nor signed: it is for a network that does not alter what it carries.
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
    """The other side does not know the secret, or speaks another language. Says which."""


def new_token() -> str:
    """A secret for one attempt."""
    return secrets.token_hex(32)


class Challenge:
    """The trainer's half, for one connection.

    Args:
        token: the secret, not empty; or what tells it from the hello, which is not proven yet.
    """

    def __init__(self, link: Link, token: str | Callable[[Frame], str]) -> None:
        link.limit = MAX_UNPROVEN_BYTES
        self._link = link
        self._tell = token if callable(token) else lambda _: token
        self._token = ""
        self._nonces = (secrets.token_hex(_NONCE_BYTES), "")

    def hello(self, seconds: float) -> Frame:
        """Ask the explorer for its hello, which is proven.

        Raises:
            NotProvenError: it is not.
            MemberLostError: the connection ended, or carries something else.
        """
        self._link.send({"kind": "challenge", "nonce": self._nonces[0]})
        hello = _next(self._link, "hello", time.monotonic() + seconds, seconds)
        self._nonces = (self._nonces[0], str(hello.get("nonce")))
        self._token = self._tell(hello)
        _check(self._token, "explorer", self._nonces, hello)
        return hello

    def welcome(self, frame: Frame) -> None:
        """Take the explorer in, and prove the same to it.

        Raises:
            MemberLostError: it is gone.
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
    """The next frame; ``seconds`` is the time of all that ends at ``deadline``, for the message."""
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
