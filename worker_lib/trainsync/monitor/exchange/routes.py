"""Requests of both sides of the exchange."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from trainsync.api.base import Model
from trainsync.api.protocol import SynchronizerAnswers, SynchronizerCall
from trainsync.monitor.access.middleware import owner_of
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.exchange.calls import Exchange
from trainsync.monitor.ledger.saves import SaveOwner


def exchange_routes(
    exchange: Exchange,
    check: Callable[[SaveOwner], Awaitable[None]],
    lease_held: Callable[[], bool],
) -> APIRouter:
    """The routes below ``/v1/synchronizer``.

    Args:
        check: raises what the caller is told whose attempt or incarnation is not in force.
        lease_held: whether this monitor is the run's: both sides must ask the same one.
    """

    async def admitted(request: Request) -> SaveOwner:
        # Once: the core may be busy with files, and explorers are not to seem silent meanwhile.
        owner = owner_of(request)
        if not lease_held():
            raise NotReadyError("this monitor does not hold its Lease")
        if not exchange.admits(owner):
            await check(owner)
            exchange.admit(owner)
        return owner

    router = APIRouter(prefix="/v1/synchronizer")
    by_owner = Annotated[SaveOwner, Depends(admitted)]
    waiting = Annotated[float, Query(ge=0, le=30)]

    @router.post("/calls")
    async def call(body: SynchronizerCall, owner: by_owner, wait: waiting = 0.0) -> Response:
        return _json(await exchange.ask(owner, body, wait))

    @router.get("/calls")
    async def calls(
        owner: by_owner,
        epoch: Annotated[str, Query(max_length=64)] = "",
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        wait: waiting = 0.0,
    ) -> Response:
        return _json(await exchange.calls(owner, epoch, after, wait))

    @router.post("/answers")
    async def answers(body: SynchronizerAnswers, owner: by_owner) -> Response:
        exchange.answer(owner, body.answers)
        return Response(status_code=204)

    return router


def _json(model: Model) -> Response:
    return JSONResponse(model.to_json_dict())
