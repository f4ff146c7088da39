"""Before the routes: authentication, the size of a body, and for which owner a request speaks.

Authentication comes before the first byte of a body is read, and no route can forget it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainsync.api import names
from trainsync.api.protocol import ErrorBody
from trainsync.monitor.access.auth import Authenticator, Caller, ServerCaller
from trainsync.monitor.errors import InvalidRequestError, MonitorError, TooLargeError
from trainsync.monitor.kube.run_reader import StaleRunError
from trainsync.monitor.ledger.saves import SaveOwner

_LOG = logging.getLogger(__name__)

# The largest honest request registers a save of some ten thousand participants.
MAX_BODY_BYTES: Final = 4 << 20
_BODY_SECONDS: Final = 20.0
_GUARDED: Final = "/v1/"
SERVERS_PATH: Final = "/v1/servers"
"""Requests of inference servers, whose tokens pass nowhere else, and no others here."""
CALLER: Final = "trainsync_caller"
"""Key of the `Caller` or `ServerCaller` in the request's state."""


def error_response(status: int, code: str, message: str) -> JSONResponse:
    """An `ErrorBody`."""
    return JSONResponse(ErrorBody(code=code, message=message).to_json_dict(), status_code=status)


class Guard:
    """Lets authenticated requests of bounded size through to ``/v1``; all others to the rest.

    Args:
        refused: told the code of every refusal.
    """

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, refused: Callable[[str], None]
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            return
        try:
            headers = Headers(scope=scope)
            body = b""
            if scope["path"].startswith(_GUARDED):
                scope.setdefault("state", {})[CALLER] = await self._caller(scope["path"], headers)
                body = await _read_body(headers, receive)
        except MonitorError as error:
            self._refused(error.code)
            _LOG.warning("refused: %s: %s", error.code, error)
            await error_response(error.status, error.code, str(error))(scope, receive, send)
            return
        except StaleRunError as error:
            await error_response(410, "gone", str(error))(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _caller(self, path: str, headers: Headers) -> Caller | ServerCaller:
        token = headers.get("authorization")
        if path == SERVERS_PATH or path.startswith(f"{SERVERS_PATH}/"):
            return await self._authenticator.check_server(token)
        return await self._authenticator.check(token)


async def _read_body(headers: Headers, receive: Receive) -> bytes:
    too_large = TooLargeError(f"the body has more than {MAX_BODY_BYTES} bytes")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        raise too_large
    parts = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise InvalidRequestError("the connection was closed amid the body")
                parts += message.get("body", b"")
                if len(parts) > MAX_BODY_BYTES:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(parts)
    except TimeoutError as error:
        raise InvalidRequestError(f"the body did not come within {_BODY_SECONDS:g} s") from error


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def owner_of(request: Request) -> SaveOwner:
    """The attempt and incarnation that a request names; the core knows whether they are in force.

    Raises:
        InvalidRequestError: they do not.
    """
    attempt = request.headers.get(names.HEADER_ATTEMPT, "")
    incarnation = request.headers.get(names.HEADER_INCARNATION, "")
    if not attempt.isdecimal() or len(attempt) > 9 or not incarnation:
        raise InvalidRequestError(
            f"headers {names.HEADER_ATTEMPT} (a number) and {names.HEADER_INCARNATION} are needed"
        )
    return SaveOwner(int(attempt), incarnation)
