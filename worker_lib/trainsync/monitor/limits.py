"""A bound on the size of request bodies, as ASGI middleware."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainsync.monitor.errors import TooLargeError

# The largest honest request registers a save of some ten thousand participants.
MAX_BODY_BYTES: Final = 4 << 20


class BodyLimit:
    """Refuses what says it is too large, and stops reading what turns out to be."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left = self._limit

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise TooLargeError(f"the body has more than {self._limit} bytes")
            return message

        await self._app(scope, limited, send)
