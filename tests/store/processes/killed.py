"""A command that is killed at a failpoint: ``killed AREA.POINT COUNT ARGS``.

It kills itself with SIGKILL when it comes to the point for the COUNT-th time.
"""

import os
import signal
import sys

from trainsync import failpoints
from trainsync.cli.app import app


def main() -> None:
    """See the module."""
    area, _, wanted = sys.argv[1].partition(".")
    left = int(sys.argv[2])

    def handler(point: str) -> None:
        nonlocal left
        if point == wanted:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(area, handler)
    app(["checkpoints", *sys.argv[3:]])


if __name__ == "__main__":
    main()
