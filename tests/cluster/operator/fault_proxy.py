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
from typing import Any, Final, NoReturn, TypeVar

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

T = TypeVar("T")
_Read = tuple[int, bytes, dict[str, str]]
_HOP_BY_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
_OBJECT: Final = re.compile(r".*/namespaces/[^/]+/(?P<plural>[^/]+)(/(?P<name>[^/]+))?")
_CALL_SECONDS: Final = 20.0


@dataclass
class Asked:
    """One request.

    Attributes:
        status: None until it was answered.
        forwarded: when it went to the API server; None while it has not.
    """

    at: float
    method: str
    path: str
    watches: bool
    status: int | None = None
    forwarded: float | None = None

    @property
    def target(self) -> tuple[str, str | None]:
        """Plural and name, without a subresource."""
        found = _OBJECT.match(self.path)
        return (found["plural"], found["name"]) if found else ("", None)


@dataclass
class _Fault:
    """What goes wrong with requests for a kind, ``left`` times more."""

    plural: str
    left: int
    method: str | None

    def is_for(self, note: Asked) -> bool:
        same = self.method in (None, note.method) and not note.watches
        return self.left > 0 and same and note.target[0] == self.plural


@dataclass
class _Unheard(_Fault):
    """The operator hears nothing of what it applies.

    It takes effect before the connection ends, or ``late`` seconds after.
    """

    late: float | None


@dataclass
class _Answer(_Fault):
    """What the proxy answers itself."""

    status: int
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
        self._unheard: list[_Unheard] = []
        self._old: list[_Fault] = []
        # By their paths, the last answers to reads, and those of when old ones were asked for.
        self._read: dict[str, _Read] = {}
        self._read_before: dict[str, _Read] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._faults = 0
        self._doubles = False
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

    def faults(self) -> int:
        """How many requests and events of `answer`, `lose`, `read_old` and `double` there were."""
        return self._faults

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
            _Answer(plural, times, method, status, watches, dict(headers or {}), event)
        )

    def lose(self, plural: str, times: int, *, late: float | None = None) -> None:
        """The next applies of objects of a kind end without an answer.

        Args:
            late: they take effect so many seconds later; None: they did before.
        """
        self._unheard.append(_Unheard(plural, times, "PATCH", late))

    def read_old(self, plural: str, times: int) -> None:
        """The next reads of a kind are answered as they were last, before now."""
        self._read_before = dict(self._read)
        self._old.append(_Fault(plural, times, "GET"))

    def double(self) -> None:
        """Each event of a watch comes twice."""
        self._doubles = True

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
        await asyncio.gather(*self._late)
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
        for faults in (self._answers, self._unheard, self._old):
            faults.clear()
        self._doubles = False
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
                    self._faults += 1
                    note.status = answer.status
                    return answer.made()
            await asyncio.sleep(self._delay)
            for fault in self._unheard:
                if fault.is_for(note):
                    fault.left -= 1
                    self._faults += 1
                    return await self._cut(request, note, fault.late)
            if (old := self._old_answer(request, note)) is not None:
                return old
            note.forwarded = time.monotonic()
            return await self._stream(request, note, number)
        finally:
            self._open.discard(number)
            self._dead.discard(number)

    async def _cut(
        self, request: web.Request, note: Asked, late: float | None
    ) -> web.StreamResponse:
        """Do what is asked now or later, and end the connection now."""
        url, body = f"{self._server}{request.path_qs}", await request.read()
        headers = _kept(request.headers)

        async def do() -> None:
            await asyncio.sleep(late or 0.0)
            note.forwarded = time.monotonic()
            async with self._session.request(
                request.method, url, headers=headers, data=body or None
            ) as upstream:
                note.status = upstream.status

        task = asyncio.create_task(do())
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        if late is None:
            await asyncio.shield(task)
        assert request.transport is not None
        request.transport.abort()
        return await _for_ever()

    def _old_answer(self, request: web.Request, note: Asked) -> web.Response | None:
        old = self._read_before.get(request.path_qs)
        for fault in self._old:
            if old is not None and fault.is_for(note):
                fault.left -= 1
                self._faults += 1
                note.status, body, headers = old
                return web.Response(status=note.status, body=body, headers=headers)
        return None

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
            read = bytearray()
            # An event is a line.
            async for chunk in upstream.content if note.watches else upstream.content.iter_any():
                if number in self._dead:
                    await _for_ever()
                await answer.write(chunk)
                if note.watches and self._doubles:
                    self._faults += 1
                    await answer.write(chunk)
                if note.method == "GET" and not note.watches:
                    read += chunk
            if note.method == "GET" and not note.watches:
                headers = _kept(upstream.headers)
                self._read[request.path_qs] = (upstream.status, bytes(read), headers)
            if number in self._dead:
                await _for_ever()
            await answer.write_eof()
            return answer


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


async def _for_ever() -> NoReturn:
    """Until the operator hangs up, which cancels the handler."""
    await asyncio.Event().wait()
    raise AssertionError
