"""Rays that start without what no test asks for."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from ray._private import services
from ray._private.node import Node

_HERE: Final = Path(__file__).parent
_AGENT: Final = "--dashboard_agent_command="
_WORKER: Final = "--python_worker_command="


@contextmanager
def small_ray() -> Iterator[None]:
    """A Ray that starts within has less to start, on each of its nodes.

    It has no process of the dashboard's, which ``include_dashboard=False`` leaves, for statistics
    of usage, and no agent of the dashboard on a node: a second of processor for each. Its workers
    do not import Ray only to become another process: see ``setup_worker.py`` beside this file.
    """
    real = services.start_ray_process

    def start(command: list[str], *arguments: Any, **named: Any) -> Any:
        return real([_smaller(word) for word in command], *arguments, **named)

    with (
        mock.patch.object(Node, "start_api_server", lambda *_, **__: None),
        mock.patch.object(services, "start_ray_process", start),
    ):
        yield


def _smaller(word: str) -> str:
    if word.startswith(_AGENT):
        arguments = word.removeprefix(_AGENT).partition("agent.py ")[2]
        return f"{_AGENT}{sys.executable} -S -E {_HERE / 'no_agent.py'} {arguments}"
    if word.startswith(_WORKER):
        theirs = Path(services.RAY_PATH, "_private", "workers", "setup_worker.py")
        assert str(theirs) in word, word
        return word.replace(str(theirs), str(_HERE / "setup_worker.py"))
    return word
