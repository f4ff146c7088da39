"""Waiting for a monitor that reads a checkpoint before it names it."""

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from trainsync.monitor.errors import VerifyingError

ResultT = TypeVar("ResultT")

RESUME_SECONDS: Final = 3600.0
"""Longest wait for a checkpoint to be read."""

_LOG = logging.getLogger(__name__)
_ONE_WAIT_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 0.2  # where the other side answers at once


def until_verified(ask: Callable[[float], ResultT], timeout: float = RESUME_SECONDS) -> ResultT:
    """``ask(seconds)`` again and again, while it says that a checkpoint is being read.

    Args:
        ask: waits so many seconds at most; raises `VerifyingError` when that was not enough.

    Raises:
        VerifyingError: it was not enough for ``timeout`` seconds. And what else ``ask`` raises.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            return ask(min(max(end - time.monotonic(), 0.0), _ONE_WAIT_SECONDS))
        except VerifyingError as error:
            if time.monotonic() >= end:
                raise VerifyingError(f"not known within {timeout:g} s: {error}") from error
            _LOG.info("%s", error)
            time.sleep(_PAUSE_SECONDS)
