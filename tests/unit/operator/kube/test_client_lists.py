"""Lists and watches of the client against an API server of our own."""

import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes_client
from trainsync.api import names
from trainsync_operator.kube.client import ApiError, KubernetesApi
from trainsync_operator.kube.kinds import SERVICE
from trainsync_operator.kube.objects import Object


def service(name: str) -> Object:
    # A list's items have neither kind nor apiVersion.
    return {"metadata": {"name": name, "namespace": "team", "uid": name, "resourceVersion": "7"}}


class Server:
    """Two pages of services; a watch with ``lines``, refused with ``status``."""

    def __init__(self) -> None:
        self.queries: list[dict[str, str]] = []
        self.lines: list[bytes] = []
        self.status = 200
        self.body: bytes | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/api/v1/namespaces/team/services"
        self.queries.append(dict(request.query))
        if self.status != 200:
            message = {"message": "too old resource version"}
            return web.json_response(message, status=self.status)
        if self.body is not None:
            return web.Response(body=self.body, content_type="application/json")
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            for line in self.lines:
                await response.write(line)
            return response
        first = "continue" not in request.query
        meta = {"resourceVersion": "9", **({"continue": "more"} if first else {})}
        return web.json_response({"items": [service("a" if first else "b")], "metadata": meta})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, KubernetesApi]]:
    made = Server()
    application = web.Application()
    application.router.add_route("GET", "/{path:.*}", made.handle)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = kubernetes_client.ApiClient(kubernetes_client.Configuration(host=site.name))
    yield made, KubernetesApi(client, lambda *_: None)
    await client.close()
    await runner.cleanup()


async def test_a_list_comes_in_pages_and_each_object_has_its_kind(
    server: tuple[Server, KubernetesApi],
) -> None:
    made, api = server
    pages = [page async for page in api.pages(SERVICE, "team", names.LABEL_RUN)]
    objects = [obj for page in pages for obj in page.items]
    assert [(o["kind"], o["apiVersion"], o["metadata"]["name"]) for o in objects] == [
        ("Service", "v1", "a"),
        ("Service", "v1", "b"),
    ]
    assert [page.version for page in pages] == ["9", "9"]
    assert {query["limit"] for query in made.queries} == {"500"}
    assert made.queries[0]["labelSelector"] == names.LABEL_RUN
    listed = await api.list(SERVICE, "team")
    assert listed[0]["kind"] == "Service"


async def test_a_watch_yields_events_until_the_api_server_ends_it(
    server: tuple[Server, KubernetesApi],
) -> None:
    made, api = server
    event = json.dumps({"type": "ADDED", "object": service("x" * 200_000)}).encode() + b"\n"
    made.lines = [event[:100], event[100:], event]
    events = [event async for event in api.watch(SERVICE, "team", "", "7")]
    assert [len(event.object["metadata"]["name"]) for event in events] == [200_000] * 2
    query = made.queries[0]
    assert (query["resourceVersion"], query["allowWatchBookmarks"]) == ("7", "true")
    assert query["timeoutSeconds"] == "30"


@pytest.mark.parametrize("line", [b"{no json\n", b"[]\n", b"{}\n"])
async def test_what_is_no_event_breaks_the_watch_and_not_the_operator(
    server: tuple[Server, KubernetesApi], line: bytes
) -> None:
    made, api = server
    made.lines = [line]
    with pytest.raises(ApiError, match="watch broke"):
        _ = [event async for event in api.watch(SERVICE, "team", "", "7")]


async def test_a_watch_that_is_refused_says_why(server: tuple[Server, KubernetesApi]) -> None:
    made, api = server
    made.status = 410
    with pytest.raises(ApiError, match="too old") as caught:
        _ = [event async for event in api.watch(SERVICE, "team", "", "7")]
    assert caught.value.status == 410


@pytest.mark.parametrize("body", [b'{"items": [', b""])
async def test_an_answer_that_is_cut_short_is_a_failure_to_be_tried_again(
    server: tuple[Server, KubernetesApi], body: bytes
) -> None:
    made, api = server
    made.body = body
    with pytest.raises(ApiError, match="not reached"):
        await api.list(SERVICE, "team")
