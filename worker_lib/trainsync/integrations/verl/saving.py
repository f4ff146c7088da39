"""Save options of verl's workers, from environment variables: verl has no settings for these."""

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Final, Literal, Self

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.runtime.context import RunContext
from trainsync.runtime.stop.shutdown import EXIT_CODE, NotMainThreadError

OVERLAPPED: Final = "TRAINSYNC_VERL_OVERLAPPED"
WHEN_FULL: Final = "TRAINSYNC_VERL_WHEN_FULL"
GRACEFUL_SHUTDOWN: Final = "TRAINSYNC_VERL_GRACEFUL_SHUTDOWN"


@dataclass(frozen=True)
class SaveSettings:
    """See `CheckpointCoordinator`, whose defaults apply to unset options.

    Attributes:
        graceful_shutdown: see `exit_in_order_on_sigterm`.
    """

    overlapped: bool = False
    when_full: Literal["wait", "skip"] = "wait"
    graceful_shutdown: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Raises `ValueError` for an invalid value; names the variable."""
        overlapped = _flag(environ, OVERLAPPED)
        graceful = _flag(environ, GRACEFUL_SHUTDOWN)
        when_full = environ.get(WHEN_FULL, "wait")
        if when_full == "wait":
            return cls(overlapped, "wait", graceful)
        if when_full == "skip":
            return cls(overlapped, "skip", graceful)
        raise ValueError(f"{WHEN_FULL} is {when_full!r}; expected wait or skip")

    def coordinator(self, context: RunContext, component_prefix: str) -> CheckpointCoordinator:
        """This rank's coordinator with these options."""
        return context.coordinator(
            when_full=self.when_full,
            overlapped=self.overlapped,
            component_prefix=component_prefix,
        )


def exit_in_order_on_sigterm() -> None:
    """From now on SIGTERM ends this process by the interpreter's exit, with code 143.

    That writes the saves that were begun, and says which are not committed; the default action of
    SIGTERM drops them. verl's loop has no place that could ask for the end, as
    `RunContext.graceful_shutdown` wants.

    Raises:
        NotMainThreadError: Python hears signals in the main thread alone, and this is another one,
            as in the asynchronous actors in which verl's Ray workers make their engines.
    """
    if threading.current_thread() is not threading.main_thread():
        raise NotMainThreadError(
            f"{GRACEFUL_SHUTDOWN} is true, and verl makes its engine in thread "
            f"{threading.current_thread().name!r}, where Python hears no signal; expected the "
            "variable to be unset: Ray's workers write on until SIGKILL without it"
        )
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_CODE)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "false")
    if value not in ("true", "false"):
        raise ValueError(f"{name} is {value!r}; expected true or false")
    return value == "true"
