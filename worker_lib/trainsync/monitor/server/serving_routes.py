"""Inference servers report, and hear of versions; trainers read what they reported."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from trainsync.api.protocol import FellowReport, ServerReport, ServersAnswer
from trainsync.monitor.access.auth import ServerCaller
from trainsync.monitor.access.middleware import CALLER, SERVERS_PATH
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.server.serving_news import VersionNews
from trainsync.monitor.serving.fellows import Fellows
from trainsync.monitor.serving.roster import ServerRoster


def serving_routes(
    roster: ServerRoster, news: VersionNews, lease_held: Callable[[], bool]
) -> APIRouter:
    """Reports of agents, and what the run's trainers read of them.

    The core is not asked, which may be busy with files.

    Args:
        lease_held: whether this monitor is the run's.
    """
    router = APIRouter()
    agents = Fellows()

    @router.post(SERVERS_PATH)
    async def report(
        body: ServerReport,
        request: Request,
        wait: Annotated[float, Query(ge=0, le=30)] = 0.0,
    ) -> Response:
        caller: ServerCaller = getattr(request.state, CALLER)
        if not lease_held():
            raise NotReadyError("this monitor does not hold its Lease")
        with roster.reporting(caller.pod, body):
            answer = await news.after(body.known, wait)
        return JSONResponse(answer.to_json_dict())

    @router.post(f"{SERVERS_PATH}/fellows")
    async def fellows(body: FellowReport, request: Request) -> Response:
        caller: ServerCaller = getattr(request.state, CALLER)
        if not lease_held():
            raise NotReadyError("this monitor does not hold its Lease")
        return JSONResponse(agents.report(caller.pod, body.address).to_json_dict())

    @router.get("/v1/inference-servers")
    async def servers() -> Response:
        if not lease_held():
            raise NotReadyError("this monitor does not hold its Lease")
        return JSONResponse(ServersAnswer(servers=roster.reporting_now()).to_json_dict())

    return router
