"""An agent that is killed: ``agent_killed AREA.POINT OPTIONS``.

It kills itself with SIGKILL when it first comes to the point.
"""

import os
import signal
import sys

from trainsync import failpoints
from trainsync.agent.__main__ import main

if __name__ == "__main__":
    area, _, wanted = sys.argv[1].partition(".")

    def handler(point: str) -> None:
        if point == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(area, handler)
    os._exit(main(sys.argv[2:]))
