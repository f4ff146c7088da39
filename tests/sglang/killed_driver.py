"""A driver that dies by kill -9 in an update: ``killed_driver.py URL POINT INDEX DIGEST``."""

import os
import signal
import sys

from trainsync import failpoints
from trainsync.engines.servers.sglang import SGLangServer
from trainsync.weights.staging.index import StagedReference

if __name__ == "__main__":
    url, struck, index, digest = sys.argv[1:]

    def die(point: str) -> None:
        """The handler of the driver's failpoints."""
        if point == struck:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable("server", die)
    SGLangServer(url).update(62, StagedReference(index, digest))
