"""The process group of a driver, rank 0, and its server's workers: made once for each process of
the server."""

import time
from typing import Final

import torch

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.place import place_of
from trainsync.engines.servers.sglang_routes.aside import CallAside
from trainsync.engines.servers.sglang_routes.base import ServerFacts
from trainsync.engines.servers.sglang_routes.buckets import TensorBucket
from trainsync.weights.errors import GroupFailedError
from trainsync.weights.transports.process_group.backend import GLOO, RankSpec, serve_store
from trainsync.weights.transports.process_group.generation import WeightGroup

_INIT: Final = "/init_weights_update_group"
_DESTROY: Final = "/destroy_weights_update_group"
_UPDATE: Final = "/update_weights_from_distributed"
_ADDRESS: Final = "127.0.0.1"  # the server is on this host
_JOIN_SECONDS: Final = 60.0
_LONGER_SECONDS: Final = 30.0  # than an update: gloo gives up after its driver


class ServerGroup:
    """See the module. One thread; a collective that hangs is given up at its deadline.

    Args:
        timeout: seconds of an update at most.

    Raises:
        ServerError: the group did not come together. The server has the weights that it had.
    """

    def __init__(
        self, calls: ServerCalls, facts: ServerFacts, timeout: float, deadline: float
    ) -> None:
        self._calls = calls
        self._facts = facts
        # The same each time: the group of a driver that died is found by it.
        self._name = f"trainsync-{place_of(calls.name)}"
        end = min(deadline, time.monotonic() + _JOIN_SECONDS)
        # No success where there is none.
        calls.raw("POST", _DESTROY, end, {"group_name": self._name})
        try:
            store = serve_store(max(1.0, end - time.monotonic()))
        except (RuntimeError, OSError) as error:
            raise ServerError(f"no process group can be offered: {error}") from error
        body = {
            "master_address": _ADDRESS,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 1 + facts.ranks,
            "group_name": self._name,
            "backend": GLOO,
        }
        asked = CallAside(calls, _INIT, end, body)
        spec = RankSpec(
            GLOO,
            self._name,
            # As SGLang and torch nest them in a worker: the group, once more, and the device.
            f"{self._name}/{self._name}//cpu/",
            0,
            1 + facts.ranks,
            _ADDRESS,
            torch.device("cpu"),
        )
        try:
            self._group = WeightGroup(
                spec,
                lambda: store,
                end,
                timeout + _LONGER_SECONDS,
                asked.problem,
                greets=False,
            )
        except GroupFailedError as error:
            raise ServerError(f"{calls.name} did not join a process group: {error}") from error
        try:
            asked.result()
        except ServerError:
            self._group.abort()
            raise

    def is_of(self, facts: ServerFacts) -> bool:
        """Whether it is a group of the server's present process."""
        return facts.started is not None and facts == self._facts

    def broadcast(
        self, bucket: TensorBucket, data: torch.Tensor, *, flush: bool, deadline: float
    ) -> None:
        """Let the server's workers receive a bucket, and load it.

        Raises:
            ServerError: they did not. The group must be left then.
        """
        body = {
            "names": [part.name for part in bucket.parts],
            "dtypes": [str(part.dtype).removeprefix("torch.") for part in bucket.parts],
            "shapes": [list(part.shape) for part in bucket.parts],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
        }
        asked = CallAside(self._calls, _UPDATE, deadline, body)
        self._group.given_up = asked.problem
        try:
            self._group.begin(data, deadline)
            self._group.finish(deadline)
        except GroupFailedError as error:
            raise ServerError(f"{self._calls.name}{_UPDATE}: {error}") from error
        asked.result()

    def leave(self) -> None:
        """Give it up: a worker that waits for a broadcast sees the connection end."""
        self._group.abort()
