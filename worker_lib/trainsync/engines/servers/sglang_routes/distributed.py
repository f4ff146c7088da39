"""Weights by broadcasts in a process group with the server's workers, one bucket at a time."""

from collections.abc import Mapping
from typing import Any

import torch

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.sglang_routes.base import LaidVersion, ServerFacts
from trainsync.engines.servers.sglang_routes.buckets import TensorBucket, in_buckets
from trainsync.engines.servers.sglang_routes.group import ServerGroup
from trainsync.engines.servers.sglang_routes.session import BucketedVersion
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
        if self._group is None or not self._group.is_of(facts):
            self._leave()
            self._group = ServerGroup(self._calls, facts, self._timeout, deadline)
        group = self._group

        def send(bucket: TensorBucket, last: bool, deadline: float) -> None:
            try:
                group.broadcast(bucket, buffer[: bucket.size], flush=last, deadline=deadline)
            except ServerError:
                self._leave()
                raise

        return BucketedVersion(self._calls, tensors, buckets, buffer, send)

    def _leave(self) -> None:
        """Give the group up, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def close(self) -> None:
        """See `Route`."""
        self._leave()
