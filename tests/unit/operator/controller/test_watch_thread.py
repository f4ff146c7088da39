"""kopf itself against an API server of our own that ends its watches badly."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from trainsync.api import names
from trainsync_operator.controller import watch, watch_thread
from trainsync_operator.controller.watch_thread import WatchThread
from trainsync_operator.kube.kinds import CHILDREN, POD, RUN, Kind
from trainsync_operator.reconcile.reconcile import Key

from tests.unit.operator.support import raw_run

# kopf waits for the kind Namespace, whether it watches namespaces or not.
KINDS = (RUN, *CHILDREN, POD, Kind("", "v1", "Namespace", "namespaces"))


class Server:
    """Serves the kinds that are watched; ``errors`` end the watches of runs in turn."""

    def __init__(self) -> None:
        self.errors: list[int] = []
        self.lists = 0
        self.watches = 0
        self.closing = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if parts[-1] == names.PLURAL:
            return await self._runs(request)
        if parts[-1] in {kind.plural for kind in KINDS}:
            return await self._stream(request) if "watch" in request.query else self._list([])
        return web.json_response(_discovery(parts))

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            return self._list([raw_run(name=f"seen-{self.lists}")])
        self.watches += 1
        assert request.query["timeoutSeconds"] == "30"  # the API server refuses a fraction
        code = self.errors.pop(0) if self.errors else None
        return await self._stream(request, code)

    @staticmethod
    def _list(items: list[Any]) -> web.Response:
        return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}})

    async def _stream(self, request: web.Request, code: int | None = None) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if code is None:
            await self.closing.wait()
            return response
        status = {"kind": "Status", "code": code, "message": "etcd is away"}
        await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        return response


def _discovery(parts: list[str]) -> dict[str, Any]:
    if parts == ["api"]:
        return {"versions": ["v1"]}
    if parts == ["apis"]:
        groups = sorted({(kind.group, kind.version) for kind in KINDS if kind.group})
        found = [
            {
                "name": group,
                "preferredVersion": {"version": version},
                "versions": [{"version": version}],
            }
            for group, version in groups
        ]
        return {"groups": found}
    group = "" if parts[0] == "api" else parts[1]
    return {"resources": [_resource(kind) for kind in KINDS if kind.group == group]}


def _resource(kind: Kind) -> dict[str, Any]:
    verbs = ["get", "list", "watch", "patch"]
    return {
        "name": kind.plural,
        "singularName": kind.name.lower(),
        "kind": kind.name,
        "namespaced": True,
        "verbs": verbs,
    }


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    made = Server()
    application = web.Application()
    application.router.add_route("GET", "/{path:.*}", made.handle)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": site.name}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    yield made
    made.closing.set()
    await runner.cleanup()


async def test_a_watch_that_ends_with_an_error_starts_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_thread, "FIRST_RESTART_SECONDS", 0.01)
    server.errors = [410, 500]
    seen: asyncio.Queue[Key] = asyncio.Queue()

    def add(key: Key, *, edited: bool = False) -> None:
        seen.put_nowait(key)

    watching = asyncio.create_task(WatchThread(add, []).run())
    async with asyncio.timeout(30):
        for number in range(1, 4):
            assert await seen.get() == Key("team", f"seen-{number}")
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_a_watch_that_is_silent_for_too_long_is_taken_up_where_it_was(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch.settings().watching.inactivity_timeout == 40
    assert watch.settings().watching.server_timeout < 40, "else a quiet watch would seem dead"
    monkeypatch.setattr(watch, "_SILENT_SECONDS", 0.1)
    watching = asyncio.create_task(WatchThread(lambda *_, **__: None, []).run())
    async with asyncio.timeout(30):
        while server.watches < 3:  # noqa: ASYNC110 -- a server has no other signal
            await asyncio.sleep(0.01)
    assert server.lists == 1
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
