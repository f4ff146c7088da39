"""Waiting in tests: on a condition, with a deadline."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for ``condition``, asked every 10 ms and, after a second, every 50; fail after
    ``seconds``.

    To ask may take milliseconds of processor, which what is waited for lacks then.
    """
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < seconds, "the condition never came true"
        time.sleep(min(max(0.01, waited / 20), 0.05))
