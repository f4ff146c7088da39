"""Restarts in place: trainers' processes are made anew in the same attempt and the same job."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from trainsync.api.status import LONGEST_RESTART_REASON
from trainsync.monitor.client.base import MonitorClient, RenewalClient
from trainsync.runtime.attempt import spmd
from trainsync.runtime.attempt.rescued import await_rescued
from trainsync.runtime.errors import JoinError
from trainsync.runtime.settings import RunSettings
from trainsync.storage.saves.incarnations import successor

if TYPE_CHECKING:
    from trainsync.checkpoint.load.resume import Resume

logger = logging.getLogger(__name__)

DEFAULT_MAX_RESTARTS: Final = 3
_PAUSES: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each restart; then the last

ResultT = TypeVar("ResultT")
Errors = type[Exception] | tuple[type[Exception], ...]


class Restartable(Protocol):
    """The calls of a `RunContext` that a loop of restarts makes."""

    def resume(self) -> "Resume | None":
        """The checkpoint to go on from."""
        ...

    def restart_in_place(self, reason: str) -> None:
        """Let the attempt go on under another incarnation."""
        ...


def renewed(
    monitor: MonitorClient, claimed_here: bool, reason: str, settings: RunSettings
) -> MonitorClient:
    """The client of the successor of this client's incarnation, which is in force from now on.

    Where the run keeps shards in memory, what is finished from there is awaited first.

    Args:
        settings: of the incarnation before.

    Raises:
        JoinError: this process, or its run, cannot be restarted in place.
        MonitorError: the monitor refuses, or is not reached.
    """
    if not claimed_here:
        raise JoinError("the process that claimed the attempt restarts it; this one joined it")
    if spmd.rank_zero() is not None:
        raise JoinError(
            "this process is one of several ranks, which end together; expected a driver whose "
            "trainers are other processes"
        )
    if not isinstance(monitor, RenewalClient):
        raise JoinError(f"a {type(monitor).__name__} restarts nothing in place")
    try:
        name = successor(monitor.incarnation)
    except ValueError as error:
        raise JoinError(str(error)) from error
    await_rescued(settings, [(monitor.attempt, monitor.incarnation)])
    return monitor.renew(name, reason[:LONGEST_RESTART_REASON])


def run_with_restarts(
    context: Restartable,
    train: "Callable[[Resume | None], ResultT]",
    restart_on: Errors,
    max_restarts: int,
    sleep: Callable[[float], None] = time.sleep,
) -> ResultT:
    """See `RunContext.with_restarts`."""
    restarts = 0
    while True:
        try:
            return train(context.resume())
        except restart_on as error:
            if restarts >= max_restarts:
                if max_restarts:
                    logger.error("%d restarts in place were not enough: %s", restarts, error)
                raise
            reason = f"{type(error).__name__}: {error}"
        # Outside of the handler: the error would keep what the call before had alive.
        pause = _PAUSES[min(restarts, len(_PAUSES) - 1)]
        restarts += 1
        logger.warning(
            "restart %d of %d in place, after %g s: %s", restarts, max_restarts, pause, reason
        )
        sleep(pause)
        try:
            context.restart_in_place(reason)
        except Exception as failed:
            failed.add_note(f"the restart in place was for {reason}")
            raise
