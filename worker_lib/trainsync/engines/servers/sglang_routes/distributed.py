"""Weights by broadcasts in a process group with the server's workers, one bucket at a time."""

from collections.abc import Mapping
from typing import Any

import torch

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.sglang_routes.base import LaidVersion, ServerFacts
from trainsync.engines.servers.sglang_routes.buckets import TensorBucket, in_buckets
from trainsync.engines.servers.sglang_routes.group import ServerGroup
from trainsync.engines.servers.sglang_routes.session import load_in_session
from trainsync.weights.staging.index import StagedIndex


class DistributedRoute:
    """See `Route`. The group is kept until a broadcast fails, or the server is started anew.

    Args:
        timeout: seconds for an update.
    """

    def __init__(self, calls: ServerCalls, bucket_bytes: int, timeout: float) -> None:
        self._calls = calls
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._group: ServerGroup | None = None

    def lay(
        self,
        index: StagedIndex,
        tensors: Mapping[str, torch.Tensor],
        info: Mapping[str, Any],
        deadline: float,
    ) -> LaidVersion:
        """See `Route`. The first bucket is packed, and the group made where there is none."""
        facts = ServerFacts.of_one_engine(info, "distributed")
        buckets = in_buckets(tensors, self._bucket_bytes)
        buffer = torch.empty(max(bucket.size for bucket in buckets), dtype=torch.uint8)
        buckets[0].pack(tensors, buffer)
        if self._group is None or not self._group.is_of(facts):
            self.leave()
            self._group = ServerGroup(self._calls, facts, self._timeout, deadline)
        return _Broadcasts(self, self._calls, tensors, buckets, buffer)

    def broadcast(
        self, bucket: TensorBucket, data: torch.Tensor, *, flush: bool, deadline: float
    ) -> None:
        """See `ServerGroup.broadcast`; a group that failed is left."""
        assert self._group is not None, "made by lay"
        try:
            self._group.broadcast(bucket, data, flush=flush, deadline=deadline)
        except ServerError:
            self.leave()
            raise

    def leave(self) -> None:
        """Give the group up, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def close(self) -> None:
        """See `Route`."""
        self.leave()


class _Broadcasts:
    def __init__(
        self,
        route: DistributedRoute,
        calls: ServerCalls,
        tensors: Mapping[str, torch.Tensor],
        buckets: list[TensorBucket],
        buffer: torch.Tensor,
    ) -> None:
        self._route = route
        self._calls = calls
        self._tensors = tensors
        self._buckets = buckets
        self._buffer = buffer

    def load(self, tag: str, deadline: float) -> None:
        def send(bucket: TensorBucket, last: bool) -> None:
            data = self._buffer[: bucket.size]
            if bucket is not self._buckets[0]:
                bucket.pack(self._tensors, data)
            self._route.broadcast(bucket, data, flush=last, deadline=deadline)

        load_in_session(self._calls, self._buckets, send, tag, deadline)

    def close(self) -> None:
        self._tensors = {}
