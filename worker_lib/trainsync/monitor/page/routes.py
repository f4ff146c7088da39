"""The page's routes. Unauthenticated, as metrics are: nothing here is secret, nothing changes."""

import asyncio
from typing import Final

from fastapi import APIRouter, Response
from starlette.types import Receive, Scope, Send

from trainsync.monitor.access.middleware import error_response
from trainsync.monitor.page.document import HEADERS
from trainsync.monitor.page.feed import Feed, TooManyStreamsError

# A reader that takes nothing for so long is let go.
_SEND_SECONDS: Final = 30.0


def page_routes(feed: Feed) -> APIRouter:
    """``/`` for people, ``/status.json`` for programs, ``/events`` for the page's script."""
    router = APIRouter()

    @router.get("/")
    async def page() -> Response:
        shown = await feed.shown()
        return Response(shown.html, media_type="text/html", headers=HEADERS)

    @router.get("/status.json")
    async def status() -> Response:
        shown = await feed.shown()
        return Response(shown.json, media_type="application/json", headers=HEADERS)

    @router.get("/events")
    async def events() -> Response:
        return _EventStream(feed)

    return router


class _EventStream(Response):
    """Sends until the feed ends or the reader is gone; each send has a deadline."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        reader = asyncio.create_task(_gone(receive))
        sender = asyncio.create_task(self._send(scope, receive, send))
        try:
            await asyncio.wait((reader, sender), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            sender.cancel()
            ended = await asyncio.gather(sender, return_exceptions=True)
        if isinstance(ended[0], Exception) and not isinstance(ended[0], OSError | TimeoutError):
            raise ended[0]

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._feed.stream()
        try:
            first = await anext(stream)
        except TooManyStreamsError as error:
            await error_response(503, "too_many_streams", str(error))(scope, receive, send)
            return
        # By hand: the length of a stream is not known.
        headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await send(start)
        try:
            await _body(send, first)
            async for part in stream:
                await _body(send, part)
        finally:
            await stream.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(send: Send, part: bytes) -> None:
    async with asyncio.timeout(_SEND_SECONDS):
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
