"""Makes the route of a name."""

from pathlib import Path
from typing import get_args

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.sglang_routes.base import Route, SGLangRoute
from trainsync.engines.servers.sglang_routes.disk import DiskRoute
from trainsync.engines.servers.sglang_routes.distributed import DistributedRoute
from trainsync.engines.servers.sglang_routes.tensor import TensorRoute


def route_of(
    name: SGLangRoute, calls: ServerCalls, memory: Path, *, bucket_bytes: int, timeout: float
) -> Route:
    """The route.

    Args:
        memory: see `DiskRoute`.
        bucket_bytes: of the others.
        timeout: see `DistributedRoute`.

    Raises:
        ValueError: there is none of this name.
    """
    if name == "disk":
        return DiskRoute(calls, memory)
    if name == "tensor":
        return TensorRoute(calls, bucket_bytes)
    if name == "distributed":
        return DistributedRoute(calls, bucket_bytes, timeout)
    raise ValueError(f"SGLang has no route {name!r}: {', '.join(get_args(SGLangRoute))}")
