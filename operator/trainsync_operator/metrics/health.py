"""/metrics, /healthz and /readyz on one port."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


async def serve(
    port: int, registry: CollectorRegistry, alive: Callable[[], bool], ready: Callable[[], bool]
) -> web.AppRunner:
    """Start the server; the caller cleans up the runner.

    Raises:
        OSError: the port is taken.
    """

    async def metrics(request: web.Request) -> web.Response:
        # OpenMetrics on request: only that format has exemplars.
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    def answer(check: Callable[[], bool]) -> Callable[[web.Request], web.Response]:
        def handle(_: web.Request) -> web.Response:
            good = check()
            return web.Response(status=200 if good else 503, text="ok" if good else "not ok")

        return handle

    async def healthz(request: web.Request) -> web.Response:
        return answer(alive)(request)

    async def readyz(request: web.Request) -> web.Response:
        return answer(ready)(request)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
