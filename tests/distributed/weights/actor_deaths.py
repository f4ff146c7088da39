"""Deaths of Ray actors as they happen: the process is gone, and nobody has told Ray.

`ray.kill` is another thing: it tells Ray first, which then gives the actor's name back at once.
"""

import os
import signal
from typing import Any

import ray


def pid_of(actor: Any) -> int:
    """The process of an actor of whatever class."""
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    return pid


def sigkill(actor: Any) -> None:
    """Kill the actor's process by SIGKILL."""
    os.kill(pid_of(actor), signal.SIGKILL)
