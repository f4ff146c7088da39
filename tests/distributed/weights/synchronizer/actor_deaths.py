"""Kills Ray actors by SIGKILL, so that Ray must detect the death itself.

`ray.kill` is different: Ray knows of the death at once and frees the actor's name.
"""

import os
import signal
from typing import Any

import ray


def pid_of(actor: Any) -> int:
    """The process ID of an actor of any class."""
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    return pid


def sigkill(actor: Any) -> None:
    """Kill the actor's process by SIGKILL."""
    os.kill(pid_of(actor), signal.SIGKILL)
