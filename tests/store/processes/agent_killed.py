"""An agent that is killed: ``agent_killed AREA.POINT[@TIMES] OPTIONS``.

It kills itself with SIGKILL when it comes to the point the first time, or so many times.
"""

import os
import signal
import sys
from itertools import count

from trainsync import failpoints
from trainsync.agent.__main__ import main

if __name__ == "__main__":
    where, _, times = sys.argv[1].partition("@")
    area, _, wanted = where.partition(".")
    visits = count(1)

    def handler(point: str) -> None:
        if point == wanted and next(visits) == int(times or 1):
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(area, handler)
    os._exit(main(sys.argv[2:]))
