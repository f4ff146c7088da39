"""The agent's HTTP endpoint. No request changes weights, but ``/prove`` asks the server."""

import json
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

_LOG = logging.getLogger(__name__)
_CLIENT_SECONDS: Final = 10.0
_TEXT: Final = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""


class EndpointError(Exception):
    """The address cannot be listened on."""


class HealthEndpoint:
    """Answers GET requests, each in a thread, until `close`.

    Args:
        answers: by path.
        port: 0: a free one.

    Attributes:
        url: of the endpoint.

    Raises:
        EndpointError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, answers: dict[str, Callable[[], Answer]]) -> None:
        class Handler(_Handler):
            paths = answers

        class Server(_HealthServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise EndpointError(f"{host} port {port} cannot be listened on: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="trainsync-endpoint", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


def text_answer(status: HTTPStatus, text: str) -> Answer:
    """One line of text."""
    return status, _TEXT, f"{text}\n".encode()


def json_answer(value: dict[str, Any]) -> Answer:
    """A JSON object."""
    return HTTPStatus.OK, "application/json", (json.dumps(value, indent=1) + "\n").encode()


class _HealthServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.warning("a request from %s was not answered", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    paths: dict[str, Callable[[], Answer]]
    timeout = _CLIENT_SECONDS  # of a client that sends or reads nothing
    server_version = "trainsync"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer one request."""
        answer = self.paths.get(self.path.partition("?")[0])
        if answer is None:
            status, kind, body = text_answer(HTTPStatus.NOT_FOUND, "there is no such page")
        else:
            status, kind, body = answer()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no line for each probe."""
