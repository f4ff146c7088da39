"""``python -m tests.distributed.processes.said_pid``: says its pid, and waits for a signal."""

import os
import signal

if __name__ == "__main__":
    print(os.getpid(), flush=True)
    signal.pause()
