"""SIGTERM in a trainer: leave the loop, write out what is staged, report what could not be.

Kubernetes sends SIGTERM and, after a grace period, SIGKILL. What is staged by then is worth the few
seconds that writing it takes.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Protocol

EXIT_CODE: Final = 128 + signal.SIGTERM
"""The exit code that shells and Kubernetes show for a process that SIGTERM ended."""

DEFAULT_GRACE_SECONDS: Final = 25.0
"""Less than the 30 s that Kubernetes gives unless the pod says otherwise."""

_LONGEST_REPORT_SECONDS: Final = 3.0
_LEAST_REPORT_SECONDS: Final = 0.5

logger = logging.getLogger(__name__)


class Saving(Protocol):
    """The calls that a shutdown makes of a `CheckpointCoordinator`."""

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until everything is written; raises what failed."""
        ...

    def abandon(self, reason: str, timeout: float) -> list[str]:
        """Report what is not written as failed; returns what that was."""
        ...


class NotMainThreadError(RuntimeError):
    """Signals reach the main thread alone, so it has to be the one that asks for them."""


class GracefulShutdown:
    """Ends a training loop in order on SIGTERM; made by `RunContext.graceful_shutdown`.

    On the first SIGTERM `requested` becomes true, for the loop to see. When the loop is left, saves
    that were begun are written, those that cannot be written in time are reported as failed (so
    that they are aborted at once, and no rank waits for them), and `SystemExit` with code 143 is
    raised. Even if a call hangs, the process has ended ``grace_seconds`` after the signal (half a
    second later, when the grace is too short to write down what failed), by the same code. A second
    SIGTERM is handled as if this object did not exist: by default it kills. So is every one in a
    process that was forked from this one: its parent's saves are none of its business.

    Args:
        savings: the coordinators of this process.
        close: lets go of the run, within so many seconds.
        grace_seconds: from the signal to the end; less than the pod's grace period.
        exit_now: ends the process without looking back.
    """

    def __init__(
        self,
        savings: tuple[Saving, ...],
        close: Callable[[float], None],
        *,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        exit_now: Callable[[int], None] = os._exit,
    ) -> None:
        if grace_seconds <= 0:
            raise ValueError(f"grace_seconds is {grace_seconds:g}, expected more than 0")
        self._savings = savings
        self._close = close
        self._grace = grace_seconds
        # Kept back for telling of what was not written.
        self._report_seconds = min(_LONGEST_REPORT_SECONDS, grace_seconds / 4)
        self._exit_now = exit_now
        self._requested = threading.Event()
        self._deadline = float("inf")
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._process = os.getpid()

    @property
    def requested(self) -> bool:
        """Whether SIGTERM came: leave the loop."""
        return self._requested.is_set()

    @property
    def seconds_left(self) -> float:
        """Seconds until the process ends in any case; infinite before the signal."""
        return max(0.0, self._deadline - time.monotonic())

    def __enter__(self) -> "GracefulShutdown":
        if threading.current_thread() is not threading.main_thread():
            raise NotMainThreadError(
                "graceful_shutdown was entered in thread "
                f"{threading.current_thread().name!r}; signals are for the main thread alone"
            )
        self._process = os.getpid()
        self._before = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.requested or os.getpid() != self._process:
            # None: it was not set from Python, and cannot be put back.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            return
        if error is not None:
            # A rank that left first breaks the collectives of the others: not worth a failure.
            logger.warning("after SIGTERM the loop ended with %s: %s", type(error).__name__, error)
        self._finish()
        raise SystemExit(EXIT_CODE) from error

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        # A second one must not wait for anything.
        signal.signal(signal.SIGTERM, self._handler_before())
        if os.getpid() != self._process:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._deadline = time.monotonic() + self._grace
        self._requested.set()
        # Not stopped when the loop has been left: ending the interpreter waits for writers, too.
        threading.Thread(target=self._watch, name="trainsync-shutdown", daemon=True).start()

    def _finish(self) -> None:
        logger.warning("SIGTERM: writing out what is staged, at most %.1f s", self.seconds_left)
        for saving in self._savings:
            try:
                saving.wait_all(max(0.0, self.seconds_left - self._report_seconds))
            except Exception as error:  # noqa: BLE001 - the others are written all the same
                logger.warning("SIGTERM: %s", error)
        self._abandon()
        try:
            # A local run's monitor gives other ranks this long: it must end before `_watch` acts.
            self._close(max(0.0, self.seconds_left - self._report_seconds))
        except Exception as error:  # noqa: BLE001 - the process ends; the next one reads the disk
            logger.warning("SIGTERM: the run was not closed in order: %s", error)

    def _abandon(self) -> None:
        # Unreported, a save would keep others waiting for its deadline: worth being a little late.
        seconds = max(_LEAST_REPORT_SECONDS, self._report_seconds / 2) / max(1, len(self._savings))
        for saving in self._savings:
            for label in saving.abandon(
                f"SIGTERM ended the process before it was written, {self._grace:g} s were given",
                seconds,
            ):
                logger.error("SIGTERM: %s is not written, and is aborted", label)

    def _watch(self) -> None:
        # The loop may never be left (it waits for a rank that is gone), so report from here too.
        time.sleep(max(0.0, self.seconds_left - self._report_seconds / 2))
        logger.error("SIGTERM: the process did not end in time, and is ended now")
        try:
            self._abandon()
        finally:
            self._exit_now(EXIT_CODE)

    def _handler_before(self) -> Callable[[int, FrameType | None], object] | int:
        # None: it was not set from Python. Ignoring would swallow the second signal.
        if self._before is None or self._before == signal.SIG_IGN:
            return signal.SIG_DFL
        return self._before
