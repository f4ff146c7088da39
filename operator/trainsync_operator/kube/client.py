"""All requests to the API server.

Resources are named here instead of discovered, so no cache can become stale.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient, Resource
from trainsync.api import names
from trainsync.kube.client import KubeError, message_of

from trainsync_operator.kube.kinds import POD, Kind
from trainsync_operator.kube.objects import Object

REQUEST_SECONDS: Final = 15
_RETRYABLE_STATUS: Final = {408, 429}
LONGEST_RETRY_AFTER: Final = 300.0
# Objects of one answer: a pod may have 20 kB.
PAGE: Final = 500
# The API server ends a watch after so long; one that is silent for longer is dead: its connection
# was cut silently.
WATCH_SECONDS: Final = 30
SILENT_SECONDS: Final = 40.0
_CONNECT_SECONDS: Final = 10.0
# What a watch may end with. aiohttp raises RuntimeError for a connection that is closed, and an
# HTTP error for a line that is too long.
_BROKEN: Final = (
    aiohttp.ClientError,
    aiohttp.http_exceptions.HttpProcessingError,
    TimeoutError,
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
)


class ApiError(KubeError):
    """The API server was not reached or cannot answer now; try again."""

    # Seconds that the API server asks to wait.
    retry_after = 0.0
    # Whether the run's status names the error already.
    already_reported = False
    # The longest back-off, in seconds: there is a job to be looked after meanwhile.
    at_most = float("inf")

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(status, message)


class ApiRefusedError(ApiError):
    """The API server refused the request; a retry would be refused too."""

    status: int

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, status)


@dataclass(frozen=True)
class Page:
    """A part of a list, and the resourceVersion of the whole of it."""

    items: list[Object]
    version: str


@dataclass(frozen=True)
class Event:
    """News of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, with its object."""

    type: str
    object: Object


class Api(Protocol):
    """The API calls of a reconcile. Every call has a deadline.

    Raises:
        ApiRefusedError: status 4xx.
        ApiError: any other failure.
    """

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object; None if it does not exist."""

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", limit: int | None = None
    ) -> list[Object]:
        """Objects of a kind, at most ``limit``; of all namespaces when ``namespace`` is None."""

    def pages(self, kind: Kind, namespace: str | None, selector: str = "") -> AsyncIterator[Page]:
        """All objects of a kind, in pages."""

    async def apply(self, kind: Kind, obj: Object) -> Object:
        """Server-side apply as the operator, with force."""

    async def try_apply(self, kind: Kind, obj: Object) -> None:
        """`apply` without effect: the API server checks the object and stores nothing."""

    async def apply_status(self, kind: Kind, obj: Object) -> Object:
        """Server-side apply of the status; refused with 409 if its ``resourceVersion`` is old."""

    async def create(self, kind: Kind, obj: Object) -> Object:
        """Make an object; refused with status 409 if it exists."""

    async def replace(self, kind: Kind, obj: Object) -> Object:
        """Replace an object at a known resourceVersion; refused with 409 if it has changed."""

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, after_all: bool = False
    ) -> None:
        """Delete the object with this uid in the background; no error if it is gone.

        A pod is deleted at once, without its grace period.

        Args:
            after_all: the object goes after all that belongs to it, a pod with its grace period.
        """


def _error(error: ApiException) -> ApiError:
    message = message_of(error)
    status = int(error.status or 0)
    # The API server answers 500 for an applied object with an unknown field or a duplicate list
    # key.
    if status == 500 and message.startswith("failed to create typed patch object"):
        return ApiRefusedError(status, message)
    if 400 <= status < 500 and status not in _RETRYABLE_STATUS:
        return ApiRefusedError(status, message)
    failed = ApiError(f"API server answered {status}: {message}", status)
    failed.retry_after = _retry_after(error)
    return failed


def _retry_after(error: ApiException) -> float:
    """Seconds of the header Retry-After, which the API server never writes as a date."""
    try:
        asked = float((error.headers or {}).get("Retry-After", 0))
    except (TypeError, ValueError):
        return 0.0
    return min(max(asked, 0.0), LONGEST_RETRY_AFTER)


def _items(kind: Kind, answer: Object) -> list[Object]:
    """The objects of a list, each with its kind, which the API server leaves out there."""
    of_kind = {"apiVersion": kind.api_version, "kind": kind.name}
    return [{**of_kind, **obj} for obj in answer.get("items") or []]


def _status_of(kind: Kind) -> dict[str, Any]:
    return {"kind": kind.name, "name": f"{kind.plural}/status", "namespaced": True, "verbs": []}


Observe = Callable[[str, str, str, float], None]
"""Called with a request's verb, resource, HTTP status (or ``unreachable``) and seconds."""


class KubernetesApi:
    """`Api` over the official client.

    Args:
        observe: called after every request.
    """

    def __init__(self, api_client: kubernetes_client.ApiClient, observe: Observe) -> None:
        self._dynamic = DynamicClient(api_client)  # type: ignore[no-untyped-call]  # kubernetes is untyped
        self._observe = observe

    def _resource(self, kind: Kind) -> Any:
        return Resource(  # type: ignore[no-untyped-call]  # kubernetes is untyped
            prefix="apis" if kind.group else "api",
            group=kind.group or None,
            api_version=kind.version,
            kind=kind.name,
            name=kind.plural,
            namespaced=True,
            client=self._dynamic,
            subresources={"status": _status_of(kind)},
        )

    async def _call(self, verb: str, method: str, resource: Any, **arguments: Any) -> Any:
        operation = getattr(self._dynamic, method)
        begun, code = time.monotonic(), "unreachable"
        try:
            answer = await operation(
                resource,
                _request_timeout=REQUEST_SECONDS,
                # Plain data; the client would wrap every field in an object of its own.
                serializer=lambda _, data: data,
                **arguments,
            )
            code = "200"
        except ApiException as error:
            code = str(error.status or code)
            raise _error(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiError(
                f"API server not reached: {str(error) or type(error).__name__}"
            ) from error
        else:
            if not isinstance(answer, dict):  # cut short by something on the way
                raise ApiError("API server not reached: its answer is no object")
            return answer
        finally:
            plural = resource.name.partition("/")[0]
            self._observe(verb, plural, code, time.monotonic() - begun)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """See `Api`."""
        try:
            found: Object = await self._call(
                "get", "get", self._resource(kind), name=name, namespace=namespace
            )
        except ApiRefusedError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", limit: int | None = None
    ) -> list[Object]:
        """See `Api`."""
        answer = await self._call(
            "list",
            "get",
            self._resource(kind),
            namespace=namespace,
            label_selector=selector or None,
            limit=limit,
        )
        return _items(kind, answer)

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = ""
    ) -> AsyncIterator[Page]:
        """All objects of a kind in pages of one moment; the API server keeps it for minutes.

        Raises:
            ApiError: as the calls of `Api`; status 410 when the list took too long.
        """
        token: str | None = None
        while True:
            answer = await self._call(
                "list",
                "get",
                self._resource(kind),
                namespace=namespace,
                label_selector=selector or None,
                limit=PAGE,
                _continue=token,
            )
            meta = answer.get("metadata") or {}
            yield Page(_items(kind, answer), str(meta.get("resourceVersion", "")))
            token = meta.get("continue")
            if not token:
                return

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, version: str
    ) -> AsyncIterator[Event]:
        """The changes after a resourceVersion, until the API server ends the watch.

        Raises:
            ApiError: the watch was refused, or broke, or was silent for too long.
        """
        resource = self._resource(kind)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=SILENT_SECONDS
        )
        begun, code = time.monotonic(), "unreachable"
        try:
            # The API server answers at once, and tells of what happens later.
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._dynamic.get(  # type: ignore[no-untyped-call]
                    resource,
                    namespace=namespace,
                    label_selector=selector or None,
                    resource_version=version,
                    timeout_seconds=WATCH_SECONDS,
                    watch="true",
                    query_params=[("allowWatchBookmarks", "true")],
                    serialize=False,
                    _request_timeout=timeout,
                )
            code = "200"
            self._observe("watch", resource.name, code, time.monotonic() - begun)
            async with answer:
                while line := await answer.content.readline():
                    event = json.loads(line)
                    yield Event(str(event["type"]), event["object"])
        except ApiException as error:
            self._observe("watch", resource.name, str(error.status), time.monotonic() - begun)
            raise _error(error) from error
        except _BROKEN as error:
            if code != "200":
                self._observe("watch", resource.name, code, time.monotonic() - begun)
            raise ApiError(f"watch broke: {error or type(error).__name__}") from error

    async def _apply(self, verb: str, resource: Any, obj: Object, **more: Any) -> Object:
        applied: Object = await self._call(
            verb,
            "server_side_apply",
            resource,
            body=obj,
            name=obj["metadata"]["name"],
            namespace=obj["metadata"]["namespace"],
            field_manager=names.OPERATOR_FIELD_MANAGER,
            force_conflicts=True,
            **more,
        )
        return applied

    async def apply(self, kind: Kind, obj: Object) -> Object:
        """See `Api`."""
        return await self._apply("apply", self._resource(kind), obj)

    async def try_apply(self, kind: Kind, obj: Object) -> None:
        """See `Api`."""
        await self._apply("apply", self._resource(kind), obj, dry_run="All")

    async def apply_status(self, kind: Kind, obj: Object) -> Object:
        """See `Api`."""
        return await self._apply("apply_status", self._resource(kind).subresources["status"], obj)

    async def create(self, kind: Kind, obj: Object) -> Object:
        """See `Api`."""
        made: Object = await self._call(
            "create",
            "create",
            self._resource(kind),
            body=obj,
            namespace=obj["metadata"]["namespace"],
        )
        return made

    async def replace(self, kind: Kind, obj: Object) -> Object:
        """See `Api`."""
        meta = obj["metadata"]
        put: Object = await self._call(
            "replace",
            "replace",
            self._resource(kind),
            body=obj,
            name=meta["name"],
            namespace=meta["namespace"],
        )
        return put

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, after_all: bool = False
    ) -> None:
        """See `Api`."""
        options: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground" if after_all else "Background",
            "preconditions": {"uid": uid},
        }
        if kind is POD and not after_all:
            options["gracePeriodSeconds"] = 0
        try:
            await self._call(
                "delete",
                "delete",
                self._resource(kind),
                name=name,
                namespace=namespace,
                body=options,
            )
        except ApiRefusedError as error:
            # Gone, or another object with that name.
            if error.status not in (404, 409):
                raise
