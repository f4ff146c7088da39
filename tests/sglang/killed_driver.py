"""A driver that dies by kill -9 in an update: ``killed_driver.py URL POINT INDEX DIGEST``, and the
route."""

import os
import signal
import sys
from typing import cast

from trainsync import failpoints
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.engines.servers.sglang_routes.base import SGLangRoute
from trainsync.weights.staging.index import StagedReference

if __name__ == "__main__":
    url, struck, index, digest = sys.argv[1:5]
    route = cast(SGLangRoute, sys.argv[5] if len(sys.argv) > 5 else "disk")

    def die(point: str) -> None:
        """The handler of the driver's failpoints."""
        if point == struck:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable("server", die)
    SGLangServer(url, route=route, bucket_bytes=40_000).update(62, StagedReference(index, digest))
