"""SGLang's session of an update: it unpacks its weights, takes buckets, and packs them again."""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final

import torch

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import KEPT, ServerError
from trainsync.engines.servers.sglang_routes.answers import problem_in, succeed
from trainsync.engines.servers.sglang_routes.buckets import TensorBucket
from trainsync.failpoints import failpoint

_BEGIN: Final = "/begin_weight_update"
_END: Final = "/end_weight_update"
_NAME: Final = "/update_weight_version"
_OPEN: Final = "session is already open"

Send = Callable[[TensorBucket, bool, float], None]
"""Lets the server load a packed bucket, by a deadline; with the last one (True) the server flushes
its cache. Raises `ServerError`."""


class BucketedVersion:
    """A version that goes bucket by bucket through one buffer: see `LaidVersion`.

    The first bucket is packed at once, while the server serves.

    Args:
        buffer: uint8, as many bytes as the largest bucket has.
        send: for a bucket that lies in the buffer.
        close: gives back what the buffer is in.
    """

    def __init__(
        self,
        calls: ServerCalls,
        tensors: Mapping[str, torch.Tensor],
        buckets: Sequence[TensorBucket],
        buffer: torch.Tensor,
        send: Send,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._calls = calls
        self._tensors = tensors
        self._buckets = buckets
        self._buffer = buffer
        self._send = send
        self._close = close
        buckets[0].pack(tensors, buffer)

    def load(self, tag: str, deadline: float) -> None:
        """See `LaidVersion`. Buckets are named once all of them are in place.

        A session that fails is left open, as the server is left paused: the next one ends it first.
        """
        _begin(self._calls, deadline)
        for number, bucket in enumerate(self._buckets):
            if number > 0:
                bucket.pack(self._tensors, self._buffer)
            self._send(bucket, number == len(self._buckets) - 1, deadline)
            failpoint("server.bucket")
        succeed(self._calls, _END, deadline, {})
        # Else SGLang ends the requests that wait for the end of the pause.
        name = {"new_version": tag, "abort_all_requests": False}
        succeed(self._calls, _NAME, deadline, name)

    def close(self) -> None:
        """See `LaidVersion`."""
        self._tensors, self._buffer = {}, torch.empty(0, dtype=torch.uint8)
        self._close()


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
