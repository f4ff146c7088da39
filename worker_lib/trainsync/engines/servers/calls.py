"""Calls of one server over HTTP, each with a deadline."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import httpx

from trainsync.engines.servers.errors import ServerError

_LONGEST_MESSAGE: Final = 1000
_LARGEST_ANSWER: Final = 64 << 20  # checksums of a hundred thousand tensors


class ServerCalls:
    """One server.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        transport: of httpx; for tests.
    """

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self._http = httpx.Client(
            base_url=url,
            transport=transport,
            # A proxy of the environment is for calls that leave the host.
            trust_env=False,
            # After an answer of 500 a server resets the connection that it kept open.
            headers={"Connection": "close"},
        )

    @property
    def name(self) -> str:
        """The server's URL, for messages."""
        return str(self._http.base_url).rstrip("/")

    def close(self) -> None:
        """Close connections; the server stays as it is."""
        self._http.close()

    def status(self, method: str, path: str, deadline: float) -> int:
        """The status of an answer, whichever it is. Raises as `raw` does."""
        return self.raw(method, path, deadline)[0]

    def ask(
        self, method: str, path: str, deadline: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The JSON object of an answer. Raises as `ask_any` does, also for another kind of JSON."""
        decoded = self.ask_any(method, path, deadline, body)
        if not isinstance(decoded, dict):
            raise ServerError(f"{self._what(path)} answered no JSON object: {str(decoded)[:100]!r}")
        return decoded

    def ask_any(
        self, method: str, path: str, deadline: float, body: Mapping[str, Any] | None = None
    ) -> Any:
        """The JSON of an answer.

        Raises:
            ServerError: none by ``deadline`` (`time.monotonic`), or not one of success.
        """
        status, said = self.raw(method, path, deadline, body)
        what = self._what(path)
        try:
            decoded = json.loads(said)
        except ValueError as error:
            raise ServerError(f"{what} answered {status} without JSON") from error
        if not httpx.codes.is_success(status):
            raise ServerError(f"{what} answered {status}: {said[:_LONGEST_MESSAGE]!r}")
        return decoded

    def raw(
        self, method: str, path: str, deadline: float, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of an answer.

        Raises:
            ServerError: none by ``deadline`` (`time.monotonic`).
        """
        left = deadline - time.monotonic()
        what = self._what(path)
        if left <= 0:
            raise ServerError(f"{what} was not called: the update's time is over")
        try:
            with (
                _cut_after(left) as extensions,
                self._http.stream(
                    method, path, json=body, timeout=left, extensions=extensions
                ) as answer,
            ):
                return answer.status_code, _read(answer, deadline)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if isinstance(error, httpx.TimeoutException) or time.monotonic() >= deadline:
                raise ServerError(f"{what} did not answer within {left:.0f} s") from error
            raise ServerError(f"{what} cannot be called: {error}") from error

    def _what(self, path: str) -> str:
        return f"{self.name}{path.partition('?')[0]}"


@contextmanager
def _cut_after(seconds: float) -> Iterator[dict[str, Any]]:
    """Extensions of a request whose connection is shut down after ``seconds``.

    httpx's own timeout begins anew with each piece of an answer: a server that sends a byte now and
    then would hold the call, and what waits for it, for ever.
    """
    streams: list[Any] = []
    over = threading.Event()

    def trace(event: str, details: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            streams.append(details["return_value"])
            if over.is_set():
                cut()

    def cut() -> None:
        over.set()
        for stream in streams:
            with suppress(OSError):  # closed by now, or taken over by TLS
                socket.socket.shutdown(stream.get_extra_info("socket"), socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield {"trace": trace}
    finally:
        timer.cancel()


def _read(answer: httpx.Response, deadline: float) -> bytes:
    """The body; a transport of tests has no connection that could be shut down."""
    said = b""
    for piece in answer.iter_bytes():
        said += piece
        if time.monotonic() > deadline or len(said) > _LARGEST_ANSWER:
            raise httpx.ReadTimeout("the answer did not end", request=answer.request)
    return said
