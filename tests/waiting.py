"""Waiting in tests: on a condition, with a deadline."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for ``condition``, asked every 10 ms; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.01)
