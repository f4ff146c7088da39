"""An agent that dies by kill -9 at a failpoint: ``killed_agent.py AREA.POINT OPTION …``."""

import os
import signal
import sys

from trainsync import failpoints
from trainsync.agent.__main__ import main

if __name__ == "__main__":
    area, _, struck = sys.argv[1].partition(".")

    def die(point: str) -> None:
        """The handler of the area's failpoints."""
        if point == struck:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(area, die)
    sys.exit(main(sys.argv[2:]))
