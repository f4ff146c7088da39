"""Requests of both sides of the exchange."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from trainsync.api.base import Model
from trainsync.api.protocol import SynchronizerAnswers, SynchronizerCall
from trainsync.monitor.exchange.calls import Exchange
from trainsync.monitor.ledger.saves import Owner
from trainsync.monitor.server.middleware import owner_of


def exchange_routes(exchange: Exchange, check: Callable[[Owner], Awaitable[None]]) -> APIRouter:
    """The routes below ``/v1/synchronizer``.

    Args:
        check: raises what the caller is told whose attempt or incarnation is not in force.
    """

    async def admitted(request: Request) -> None:
        # Once: the core may be busy with files, and explorers are not to seem silent meanwhile.
        owner = owner_of(request)
        if not exchange.admits(owner):
            await check(owner)
            exchange.admit(owner)

    router = APIRouter(prefix="/v1/synchronizer", dependencies=[Depends(admitted)])
    waiting = Annotated[float, Query(ge=0, le=30)]

    @router.post("/calls")
    async def call(body: SynchronizerCall, wait: waiting = 0.0) -> Response:
        return _json(await exchange.ask(body, wait))

    @router.get("/calls")
    async def calls(
        epoch: Annotated[str, Query(max_length=64)] = "",
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        wait: waiting = 0.0,
    ) -> Response:
        return _json(await exchange.calls(epoch, after, wait))

    @router.post("/answers")
    async def answers(body: SynchronizerAnswers) -> Response:
        exchange.answer(body.answers)
        return Response(status_code=204)

    return router


def _json(model: Model) -> Response:
    return JSONResponse(model.to_json_dict())
