"""The training loop's side of a suspension or a preemption: a save in time, no step after it."""

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from trainsync.api.protocol import StopPoll
from trainsync.dist.errors import PeerError
from trainsync.monitor.client.base import MonitorClient, StopClient
from trainsync.monitor.errors import MonitorError
from trainsync.runtime.attempt import spmd
from trainsync.runtime.errors import JoinError
from trainsync.runtime.settings import RunSettings
from trainsync.runtime.stop.listener import StopListener

if TYPE_CHECKING:
    from trainsync.dist.rank_zero import RankZero

logger = logging.getLogger(__name__)

_AGREE_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.2  # signals are handled between two looks


class StopRequests:
    """Requests to save before the pods go, as the monitor passes them on.

    Args:
        monitor: opens this process's client of the monitor.
        ranks: what rank 0 tells the others; None where this process is no rank of several.

    Attributes:
        listener: None until a loop has asked here.
    """

    def __init__(
        self,
        settings: RunSettings,
        monitor: Callable[[], MonitorClient],
        ranks: "Callable[[], RankZero | None]" = spmd.rank_zero,
    ) -> None:
        self._is_local = settings.is_local
        self._monitor = monitor
        self._ranks = ranks
        self.listener: StopListener | None = None
        self._listening = threading.Lock()  # guards the listener

    def saves(self, step: int, *, due: bool) -> bool:
        """See `RunContext.should_checkpoint`; ``due``: the step is saved in any case."""
        if self._is_local:
            return due
        ranks = self._ranks()
        if ranks is not None and ranks.rank > 0:
            return due or self._told(ranks, step)
        asked = self._hear().answer(step) if self._can_hear() else False
        if ranks is not None and not due:
            self._tell(ranks, step, asked)
        return due or asked

    def answer(self, step: int) -> bool:
        """See `RunContext.answer_stop`."""
        monitor = self._monitor()
        if self._is_local or not isinstance(monitor, StopClient):
            return False
        try:
            notice = monitor.poll_stop(StopPoll())
            if notice is None:
                return False
            monitor.poll_stop(StopPoll(since=notice.since, step=step))
        except MonitorError as error:
            logger.debug("no request to save was answered with step %d: %s", step, error)
            return False
        return True

    def wait(self, unless: Callable[[], bool]) -> None:
        """See `RunContext.wait_if_stopping`."""
        listener = self.listener
        while listener is not None and listener.answered is not None and not unless():
            listener.wait(_LOOK_SECONDS)

    @staticmethod
    def _tell(ranks: "RankZero", step: int, asked: bool) -> None:
        try:
            ranks.tell(f"stop/{step}", "1" if asked else "0")
        except PeerError as error:
            raise JoinError(str(error)) from error

    @staticmethod
    def _told(ranks: "RankZero", step: int) -> bool:
        try:
            return ranks.told(f"stop/{step}", _AGREE_SECONDS) == "1"
        except PeerError as error:
            raise JoinError(str(error)) from error

    def _can_hear(self) -> bool:
        return isinstance(self._monitor(), StopClient)

    def _hear(self) -> StopListener:
        monitor = self._monitor()
        assert isinstance(monitor, StopClient)
        with self._listening:
            if self.listener is None:
                self.listener = StopListener(monitor)
            return self.listener
