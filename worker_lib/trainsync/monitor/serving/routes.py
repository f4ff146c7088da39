"""The request of inference servers' agents: a report, answered with news of versions."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Protocol, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from trainsync.api.protocol import ServerNews, ServerReport
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.server.auth import ServerCaller
from trainsync.monitor.server.middleware import CALLER, SERVERS_PATH
from trainsync.monitor.serving.news import VersionNews
from trainsync.monitor.serving.roster import ServerRoster

AnswerT = TypeVar("AnswerT")


class Until(Protocol):
    """See `trainsync.monitor.server.routes.Service.until`."""

    async def __call__(
        self,
        ask: Callable[[], Awaitable[AnswerT]],
        done: Callable[[AnswerT], bool],
        seconds: float,
    ) -> AnswerT: ...


def serving_routes(
    roster: ServerRoster, news: VersionNews, until: Until, lease_held: Callable[[], bool]
) -> APIRouter:
    """``POST /v1/servers``; the core is not asked, which may be busy with files.

    Args:
        lease_held: whether this monitor is the run's.
    """
    router = APIRouter()

    @router.post(SERVERS_PATH)
    async def report(
        body: ServerReport,
        request: Request,
        wait: Annotated[float, Query(ge=0, le=30)] = 0.0,
    ) -> Response:
        caller: ServerCaller = getattr(request.state, CALLER)
        if not lease_held():
            raise NotReadyError("this monitor does not hold its Lease")

        async def ask() -> ServerNews:
            return news.now()

        with roster.reporting(caller.pod, body):
            answer = await until(ask, lambda found: found.mark != body.known, wait)
        return JSONResponse(answer.to_json_dict())

    return router
