"""SGLang's session of an update: it unpacks its weights, takes buckets, and packs them again."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import KEPT, ServerError
from trainsync.engines.servers.sglang_routes.answers import problem_in, succeed
from trainsync.engines.servers.sglang_routes.buckets import TensorBucket
from trainsync.failpoints import failpoint

_BEGIN: Final = "/begin_weight_update"
_END: Final = "/end_weight_update"
_NAME: Final = "/update_weight_version"
_OPEN: Final = "session is already open"

Send = Callable[[TensorBucket, bool], None]
"""Lets the server load a bucket; with the last one it flushes its cache. Raises `ServerError`."""


def load_in_session(
    calls: ServerCalls, buckets: Sequence[TensorBucket], send: Send, tag: str, deadline: float
) -> None:
    """Load the buckets, and name them once all of it is in place.

    A session that fails is left open, as the server is left paused: the next one ends it first.

    Raises:
        ServerError: the server did not take all of it; see `LaidVersion.load`.
    """
    _begin(calls, deadline)
    for number, bucket in enumerate(buckets, start=1):
        send(bucket, number == len(buckets))
        failpoint("server.bucket")
    succeed(calls, _END, deadline, {})
    # Else SGLang ends the requests that wait for the end of the pause.
    name = {"new_version": tag, "abort_all_requests": False}
    succeed(calls, _NAME, deadline, name)


def _begin(calls: ServerCalls, deadline: float) -> None:
    status, said = calls.raw("POST", _BEGIN, deadline, {})
    problem = problem_in(status, said)
    if problem is None:
        return
    if status == HTTPStatus.NOT_FOUND:
        raise ServerError(
            f"{KEPT}: {calls.name} has no {_BEGIN}, which SGLang 0.5.23 has: choose route disk"
        )
    if _OPEN not in problem:
        raise ServerError(f"{calls.name}{_BEGIN}: {problem}")
    succeed(calls, _END, deadline, {})  # of an update that failed, or whose driver died
    succeed(calls, _BEGIN, deadline, {})
