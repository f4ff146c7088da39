"""The monitor's HTTP service: routes, authentication, fencing. Thin: the core does the work.

`trainsync.monitor.access.middleware` has authenticated every caller before a route is asked.
The protocol is specified in `trainsync.api.protocol`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trainsync.api.base import Model
from trainsync.api.protocol import (
    ClaimRequest,
    CommitAnswer,
    CommitNotice,
    DamageReport,
    FailureReport,
    Farewell,
    LoadReport,
    PermitRequest,
    ProgressReport,
    ReceiptHint,
    RenewRequest,
    ResumeAnswer,
    ResumePoint,
    SaveKind,
    SaveRequest,
    SaveState,
    StopNews,
    StopPoll,
    WeightsReport,
)
from trainsync.monitor import errors
from trainsync.monitor.access.auth import Authenticator, Caller
from trainsync.monitor.access.middleware import CALLER, Guard, error_response, owner_of
from trainsync.monitor.access.served_core import ServedCore
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.commit import newest as commits
from trainsync.monitor.core.core_thread import CoreThread
from trainsync.monitor.exchange.calls import Exchange
from trainsync.monitor.exchange.routes import exchange_routes
from trainsync.monitor.kube.run_reader import RunReader, StaleRunError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.page.feed import Feed
from trainsync.monitor.page.routes import page_routes
from trainsync.monitor.server.metrics import MonitorMetrics
from trainsync.monitor.server.serving_news import VersionNews
from trainsync.monitor.server.serving_routes import serving_routes
from trainsync.monitor.server.stops import Stops, farewell
from trainsync.monitor.serving.roster import ServerRoster
from trainsync.storage.layout import MAX_STEP

ResultT = TypeVar("ResultT")

_LOG = logging.getLogger(__name__)
_CORE_SECONDS: Final = 110.0  # less than the client waits for a claim, the longest of requests
LONGEST_LOOK_SECONDS: Final = 180.0
"""Where the disk was not looked at for longer, the monitor is not ready."""
_LONGEST_METRIC_NAME: Final = 128
_FAREWELL_AGE: Final = 1.0  # seconds: a pod that is told to end waits for what is new
_MOST_WAITERS: Final = 64  # for commits: a run needs one
_ENDED: Final = (SaveState.COMMITTED, SaveState.ABORTED)


@dataclass(frozen=True)
class Service:
    """The objects that the routes use."""

    thread: CoreThread[ServedCore]
    authenticator: Authenticator
    reader: RunReader
    metrics: MonitorMetrics
    signal: ChangeSignal
    news: commits.CommitNews
    lease_held: Callable[[], bool]
    page: Feed
    stops: Stops
    exchange: Exchange
    servers: ServerRoster
    versions: VersionNews

    async def core(self, call: Callable[[ServedCore], ResultT]) -> ResultT:
        """``call(core)`` in the core's thread.

        Raises:
            MonitorUnavailableError: not done in time.
        """
        future = asyncio.wrap_future(self.thread.submit(call))
        try:
            return await asyncio.wait_for(future, _CORE_SECONDS)
        except TimeoutError as error:
            raise errors.MonitorUnavailableError(
                f"the monitor was busy for {_CORE_SECONDS:g} s"
            ) from error

    async def check(self, owner: SaveOwner) -> None:
        """See `ServedCore.check`."""
        await self.core(lambda core: core.check(owner))


def create_app(service: Service) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="trainsync monitor", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, authenticator=service.authenticator, refused=service.metrics.refused)
    app.include_router(_health_routes(service))
    app.include_router(page_routes(service.page))
    app.include_router(_run_routes(service))
    app.include_router(exchange_routes(service.exchange, service.check, service.lease_held))
    app.include_router(serving_routes(service.servers, service.versions, service.lease_held))

    @app.exception_handler(errors.MonitorError)
    async def _refuse(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, errors.MonitorError)
        service.metrics.refused(error.code)
        # Of a checkpoint that is read, the reader tells how far it is.
        level = logging.DEBUG if isinstance(error, errors.VerifyingError) else logging.WARNING
        _LOG.log(level, "refused: %s: %s", error.code, error)
        return error_response(error.status, error.code, str(error))

    @app.exception_handler(StaleRunError)
    async def _gone(_request: Request, error: Exception) -> JSONResponse:
        return error_response(410, "gone", str(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return error_response(422, errors.InvalidRequestError.code, f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, "http", str(error.detail))

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, errors.MonitorError.code, f"{type(error).__name__}: see the log")

    return app


def _health_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> Response:
        if not service.thread.alive:
            return error_response(503, "dead", f"the core failed: {service.thread.failure}")
        return Response("ok\n", media_type="text/plain")

    @router.get("/readyz")
    async def readyz() -> Response:
        if not service.lease_held():
            return error_response(503, "not_ready", "the Lease is not held")
        if not service.thread.ready:
            return error_response(503, "not_ready", "the ledger is not read yet")
        waiting = service.thread.seconds_since_look
        if waiting > LONGEST_LOOK_SECONDS:
            words = (
                f"the disk was not looked at for {waiting:.0f} s: the volume or bucket does not "
                "answer, or files are being read"
            )
            _LOG.error("not ready: %s", words)
            return error_response(503, "not_ready", words)
        return Response("ok\n", media_type="text/plain")

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        view, report = await service.core(lambda core: (core.view(), core.last_report()))
        text, content_type = service.metrics.render(
            view,
            report,
            lease_held=service.lease_held(),
            accept=request.headers.get("accept", ""),
        )
        return Response(text, headers={"content-type": content_type})

    return router


def _run_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1")
    # Whose request it is; the core refuses it when that owner is not in force.
    by_owner = Annotated[SaveOwner, Depends(owner_of)]

    @router.post("/claims")
    async def claim(body: ClaimRequest, request: Request) -> Response:
        caller: Caller = getattr(request.state, CALLER)
        facts = await service.reader.confirmed()
        present = facts.generations.get(body.cluster)
        if present is None or caller.generation > present:
            raise errors.NotYetError(
                f"the run's status does not show cluster {body.cluster!r} of attempt "
                f"{caller.generation} yet"
            )
        if caller.generation < present:
            raise errors.ForbiddenError(
                f"the token is of cluster {body.cluster!r} of attempt {caller.generation}, "
                f"which attempt {present} replaced"
            )
        owner = SaveOwner(body.attempt, body.incarnation)

        def granted(core: ServedCore) -> None:
            # First: what the spec asked for just now holds for this attempt.
            core.resume_from(facts.resume_from)
            core.claim(owner, body.cluster, facts.attempt)

        await service.core(granted)
        service.exchange.admit(owner)
        return Response(status_code=204)

    @router.post("/renewals")
    async def renew(body: RenewRequest, owner: by_owner) -> Response:
        await service.core(lambda core: core.renew(owner, body.successor, body.reason))
        service.exchange.dismiss(owner)
        return Response(status_code=204)

    @router.post("/saves")
    async def register(body: SaveRequest, owner: by_owner) -> Response:
        return _json(await service.core(lambda core: core.saves.register(owner, body)))

    @router.get("/saves/{kind}/{step}")
    async def save_status(
        kind: SaveKind,
        step: int,
        owner: by_owner,
        wait: Annotated[float, Query(ge=0, le=30)] = 0.0,
    ) -> Response:
        status = await service.signal.until(
            lambda: service.core(lambda core: core.saves.save_status(owner, kind, step)),
            lambda status: status.state in _ENDED,
            wait,
        )
        return _json(status)

    waiters = commits.Waiters(_MOST_WAITERS)

    @router.get("/commits/{kind}")
    async def newer_commit(
        kind: SaveKind,
        owner: by_owner,
        after_attempt: Annotated[int, Query(ge=-1, le=MAX_STEP)] = -1,
        after_step: Annotated[int, Query(ge=-1, le=MAX_STEP)] = -1,
        wait: Annotated[float, Query(ge=0, le=30)] = 0.0,
    ) -> Response:
        after, allowed = (after_attempt, after_step), False

        async def ask() -> CommitNotice | None:
            nonlocal allowed
            found = service.news.newer(kind, owner.attempt, after) if allowed else None
            if found is None:
                newest = await service.core(lambda core: core.newest(owner, kind))
                found, allowed = commits.newer(newest, after), True
            return found

        with waiters.place() if wait > 0 else nullcontext():
            found = await service.signal.until(ask, lambda found: found is not None, wait)
        # With its null, as a resume has it.
        answer = CommitAnswer(commit=found)
        return JSONResponse(answer.model_dump(mode="json", by_alias=True))

    @router.post("/receipts")
    async def receipt(body: ReceiptHint, owner: by_owner) -> Response:
        await service.core(lambda core: core.saves.receipt_hint(owner, body))
        return Response(status_code=204)

    @router.post("/failures")
    async def failure(body: FailureReport, owner: by_owner) -> Response:
        await service.core(lambda core: core.saves.failure(owner, body))
        return Response(status_code=204)

    @router.get("/resume")
    async def resume(owner: by_owner, wait: Annotated[float, Query(ge=0, le=30)] = 0.0) -> Response:
        async def ask() -> ResumePoint | errors.VerifyingError | None:
            try:
                return await service.core(lambda core: core.resume(owner))
            except errors.VerifyingError as error:
                return error

        point = await service.signal.until(
            ask, lambda found: not isinstance(found, errors.VerifyingError), wait
        )
        if isinstance(point, errors.VerifyingError):
            raise point
        answer = ResumeAnswer(point=point)
        # With its null: an answer that is cut short must not read as "start at step 0".
        return JSONResponse(answer.model_dump(mode="json", by_alias=True))

    @router.post("/damage")
    async def damage(body: DamageReport, owner: by_owner) -> Response:
        await service.core(lambda core: core.damage(owner, body))
        return Response(status_code=204)

    @router.post("/loads")
    async def load(body: LoadReport, owner: by_owner) -> Response:
        await service.core(lambda core: core.loaded(owner, body))
        return Response(status_code=204)

    @router.post("/permits")
    async def permit(
        body: PermitRequest,
        owner: by_owner,
        wait: Annotated[float, Query(ge=0, le=30)] = 0.0,
    ) -> Response:
        answer = await service.signal.until(
            lambda: service.core(lambda core: core.write_permit(owner, body)),
            lambda answer: answer.granted or body.held,
            wait,
        )
        return _json(answer)

    @router.delete("/permits/{holder}")
    async def release_permit(holder: str, owner: by_owner) -> Response:
        await service.core(lambda core: core.release_permit(owner, holder))
        return Response(status_code=204)

    @router.post("/stop")
    async def stop(
        body: StopPoll, owner: by_owner, wait: Annotated[float, Query(ge=0, le=30)] = 0.0
    ) -> Response:
        async def ask() -> StopNews:
            return service.stops.news()

        def is_news(news: StopNews) -> bool:
            return (news.notice.since if news.notice else None) != body.since

        await service.core(lambda core: core.answer_stop(owner, body.since, body.step))
        if body.step is not None:
            service.signal.notify_threadsafe()  # the status tells of the answer
        news = await service.signal.until(ask, is_news, wait)
        # With its null: it says that nothing is asked for.
        return JSONResponse(news.model_dump(mode="json", by_alias=True))

    @router.get("/farewell")
    async def say_farewell(request: Request) -> Response:
        caller: Caller = getattr(request.state, CALLER)
        facts = await service.reader.facts(_FAREWELL_AGE)
        saved = await service.core(lambda core: core.stop_save())
        return _json(Farewell(state=farewell(facts, caller.generation, saved)))

    @router.post("/progress")
    async def progress(body: ProgressReport, owner: by_owner) -> Response:
        long = [name for name in body.metrics if not 0 < len(name) <= _LONGEST_METRIC_NAME]
        if long:
            raise errors.InvalidRequestError(
                f"metrics: name {long[0][:64]!r} has {len(long[0])} characters, expected 1 to "
                f"{_LONGEST_METRIC_NAME}"
            )
        await service.core(lambda core: core.report_progress(owner, body))
        return Response(status_code=204)

    @router.post("/weights")
    async def weights(body: WeightsReport, owner: by_owner) -> Response:
        await service.core(lambda core: core.report_weights(owner, body))
        return Response(status_code=204)

    return router


def _json(model: Model) -> JSONResponse:
    return JSONResponse(model.to_json_dict())
