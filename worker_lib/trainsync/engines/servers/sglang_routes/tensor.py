"""Weights by tensors in shared memory, one bucket at a time: no second copy of the version."""

import base64
from collections.abc import Mapping
from typing import Any, Final

import torch

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.sglang_routes.answers import succeed
from trainsync.engines.servers.sglang_routes.base import LaidVersion, ServerFacts
from trainsync.engines.servers.sglang_routes.buckets import TensorBucket, in_buckets
from trainsync.engines.servers.sglang_routes.handles import SharedBucket
from trainsync.engines.servers.sglang_routes.session import BucketedVersion
from trainsync.weights.staging.index import StagedIndex

_UPDATE: Final = "/update_weights_from_tensor"


class TensorRoute:
    """See `Route`. The server must see this process's /dev/shm: a worker that does not, ends."""

    def __init__(self, calls: ServerCalls, bucket_bytes: int) -> None:
        self._calls = calls
        self._bucket_bytes = bucket_bytes

    def lay(
        self,
        index: StagedIndex,
        tensors: Mapping[str, torch.Tensor],
        info: Mapping[str, Any],
        deadline: float,
    ) -> LaidVersion:
        """See `Route`. The first bucket is packed."""
        facts = ServerFacts.of_one_engine(info, "tensor")
        buckets = in_buckets(tensors, self._bucket_bytes)
        shared = SharedBucket(max(bucket.size for bucket in buckets))

        def send(bucket: TensorBucket, last: bool, deadline: float) -> None:
            handle = base64.b64encode(shared.handle(bucket, facts.ranks)).decode()
            # Each rank unpickles the one of its number.
            body = {"serialized_named_tensors": [handle] * facts.ranks, "flush_cache": last}
            succeed(self._calls, _UPDATE, deadline, body)

        return BucketedVersion(self._calls, tensors, buckets, shared.data, send, shared.close)

    def close(self) -> None:
        """See `Route`."""
