"""A proxy before the API server that breaks the ways to it, and counts what comes through.

It speaks HTTP, so that it sees requests: a kubeconfig that points to `FaultProxy.url` needs no CA.
"""

import asyncio
import json
import re
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

T = TypeVar("T")
_HOP_BY_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
_OBJECT: Final = re.compile(r".*/namespaces/[^/]+/(?P<plural>[^/]+)(/(?P<name>[^/]+))?")
_CALL_SECONDS: Final = 20.0


@dataclass
class Asked:
    """One request; ``status`` is None until it was answered."""

    at: float
    method: str
    path: str
    watches: bool
    status: int | None = None

    @property
    def target(self) -> tuple[str, str | None]:
        """Plural and name, without a subresource."""
        found = _OBJECT.match(self.path)
        return (found["plural"], found["name"]) if found else ("", None)


@dataclass
class _Answer:
    """What the proxy answers itself, ``left`` times more."""

    status: int
    plural: str
    left: int
    method: str | None
    watches: bool
    headers: Mapping[str, str]
    event: bool

    def is_for(self, note: Asked) -> bool:
        same = self.method in (None, note.method) and self.watches == note.watches
        return self.left > 0 and same and note.target[0] == self.plural

    def made(self) -> web.Response:
        self.left -= 1
        told: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "code": self.status,
            "message": f"the proxy answers {self.status}",
        }
        if self.event:
            told = {"type": "ERROR", "object": told}
        status = 200 if self.event else self.status
        text = json.dumps(told) + "\n"
        kind = "application/json"
        return web.Response(status=status, text=text, content_type=kind, headers=self.headers)


class FaultProxy:
    """Forwards requests to the API server; its methods may be called from any thread.

    Args:
        cluster: of a kubeconfig, with the API server and its CA.
        port: of 127.0.0.1, to listen on.
    """

    def __init__(self, cluster: dict[str, str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._server, self._port = cluster["server"], port
        ca = b64decode(cluster["certificate-authority-data"]).decode()
        self._context = ssl.create_default_context(cadata=ca)
        self._asked: list[Asked] = []
        self._open: set[int] = set()
        self._dead: set[int] = set()
        self._fails: str | None = None
        self._fails_all = False
        self._answers: list[_Answer] = []
        self._delay = 0.0
        self._hangs = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # -- what tests use ---------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        """Serve in a thread of its own."""
        self._thread.start()
        self._do(self._begin())
        try:
            yield self
        finally:
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_SECONDS)

    def asked(self, since: float = 0.0) -> list[Asked]:
        """All requests since a time of `time.monotonic`."""
        return [one for one in list(self._asked) if one.at >= since]

    def made(self, plural: str) -> list[str | None]:
        """Names of the objects that were made by server-side apply, in order."""
        return [
            one.target[1]
            for one in self.asked()
            if (one.method, one.status) == ("PATCH", 201) and one.target[0] == plural
        ]

    def refuse(self) -> None:
        """Nothing listens any more, and all connections are reset."""
        self._do(self._refuse())

    def hang(self) -> None:
        """Connections stay, and nothing more is answered; requests of now are never answered."""
        self._do(self._hang())

    def fail(self, plural: str | None) -> None:
        """Requests for objects of a kind, or None for all, are answered with 500.

        Watches of all that run end; of a kind they go on.
        """
        self._fails, self._fails_all = plural, plural is None
        if plural is None:
            self._do(self._reset())

    def answer(
        self,
        status: int,
        plural: str,
        times: int,
        headers: Mapping[str, str] | None = None,
        *,
        method: str | None = None,
        watches: bool = False,
        event: bool = False,
    ) -> None:
        """The next requests for objects of a kind are answered by the proxy, without the server.

        Args:
            method: of those requests; None for all.
            watches: of watches, instead of all other requests.
            event: a watch is answered with 200 and an event of type ERROR.
        """
        self._answers.append(
            _Answer(status, plural, times, method, watches, dict(headers or {}), event)
        )

    def delay(self, seconds: float) -> None:
        """Each request waits so long before it is forwarded."""
        self._delay = seconds

    def heal(self) -> None:
        """All requests come through again; what was lost stays lost."""
        self._do(self._heal())

    def heal_connections(self) -> None:
        """After `refuse`: connections are taken again, and what else was asked for stays."""
        self._do(self._heal_connections())

    # -- in its thread ----------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_SECONDS)

    async def _begin(self) -> None:
        connector = TCPConnector(ssl=self._context, limit=0)
        timeout = ClientTimeout(total=None, connect=10)
        self._session = ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._forward)
        # A client that hangs up ends the handler that holds its answer back.
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await self._listen()

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await self._site.start()

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _refuse(self) -> None:
        await self._site.stop()
        await self._reset()

    async def _reset(self) -> None:
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            connection.force_close()

    async def _hang(self) -> None:
        self._dead |= self._open
        self._hangs = True

    async def _heal(self) -> None:
        self._fails, self._fails_all, self._hangs, self._delay = None, False, False, 0.0
        self._answers.clear()
        await self._heal_connections()

    async def _heal_connections(self) -> None:
        if self._site not in self._runner.sites:
            await self._listen()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        note = Asked(time.monotonic(), request.method, request.path, "watch" in request.query)
        self._asked.append(note)
        number = len(self._asked)
        self._open.add(number)
        try:
            if self._hangs:
                await _for_ever()
            if self._fails_all or (self._fails and note.target[0] == self._fails):
                note.status = 500
                return web.Response(status=500, text="the proxy says so")
            for answer in self._answers:
                if answer.is_for(note):
                    note.status = answer.status
                    return answer.made()
            await asyncio.sleep(self._delay)
            return await self._stream(request, note, number)
        finally:
            self._open.discard(number)
            self._dead.discard(number)

    async def _stream(self, request: web.Request, note: Asked, number: int) -> web.StreamResponse:
        url = f"{self._server}{request.path_qs}"
        body = await request.read()
        async with self._session.request(
            request.method, url, headers=_kept(request.headers), data=body or None
        ) as upstream:
            answer = web.StreamResponse(status=upstream.status, headers=_kept(upstream.headers))
            note.status = upstream.status
            if number in self._dead:
                await _for_ever()
            await answer.prepare(request)
            async for chunk in upstream.content.iter_any():
                if number in self._dead:
                    await _for_ever()
                await answer.write(chunk)
            if number in self._dead:
                await _for_ever()
            await answer.write_eof()
            return answer


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


async def _for_ever() -> None:
    """Until the operator hangs up, which cancels the handler."""
    await asyncio.Event().wait()
