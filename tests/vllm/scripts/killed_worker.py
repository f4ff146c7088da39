"""An agent amid whose update a worker of its server dies: ``killed_worker.py PID ARMED OPTION …``.

When the server is paused, and a file ``ARMED`` is there, the worker is stopped: the weights that
are sent then cannot be loaded. A second later it is killed, while the server waits for it.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from trainsync import failpoints
from trainsync.agent.__main__ import main

if __name__ == "__main__":
    worker, armed = int(sys.argv[1]), Path(sys.argv[2])

    def strike(point: str) -> None:
        """The handler of a server's failpoints; strikes once."""
        if point == "paused" and armed.exists():
            armed.unlink()
            os.kill(worker, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (worker, signal.SIGKILL)).start()

    failpoints.enable(failpoints.SERVER, strike)
    sys.exit(main(sys.argv[3:]))
