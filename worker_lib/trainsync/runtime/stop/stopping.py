"""The training loop's side of a suspension or a preemption: a save in time, no step after it."""

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Final

from trainsync.api.protocol import StopPoll
from trainsync.monitor.client.base import MonitorClient, StopClient
from trainsync.monitor.errors import MonitorError
from trainsync.runtime import spmd
from trainsync.runtime.description import RunDescription
from trainsync.runtime.settings import RunSettings
from trainsync.runtime.stop.listener import StopListener

logger = logging.getLogger(__name__)

_AGREE_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.2  # signals are handled between two looks


class Stopping(RunDescription):
    """The part of `RunContext` that hears of requests to save before the pods go."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self._listener: StopListener | None = None
        self._listening = threading.Lock()  # guards the listener

    @property
    @abstractmethod
    def monitor(self) -> MonitorClient:
        """This process's client of the monitor."""

    def should_checkpoint(self, step: int, last: int | None = None) -> bool:
        """Whether to save after ``step``: every ``checkpoint.interval``, after the ``last``, and
        once when the run is suspended or preempted: its pods wait for that save.

        Where torch.distributed has several ranks, call it on every rank, at the same steps: rank 0
        hears of the request and all answer alike. A driver of Ray actors calls it alone.

        Raises:
            JoinError: rank 0 did not call it for this step within five minutes.
        """
        due = super().should_checkpoint(step, last)
        if self.is_local:
            return due
        if spmd.is_first():
            asked = self._hear().answer(step) if self._can_hear() else False
            if spmd.is_group() and not due:
                spmd.tell(f"stop/{step}", "1" if asked else "0")
            return due or asked
        return due or spmd.told(f"stop/{step}", _AGREE_SECONDS) == "1"

    def answer_stop(self, step: int) -> bool:
        """Say that ``step`` is saved, if a save is asked for: whether one was.

        For loops of others, which do not call `should_checkpoint`; asks the monitor now. To be
        called on one rank.
        """
        monitor = self.monitor
        if self.is_local or not isinstance(monitor, StopClient):
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

    def wait_if_stopping(self, unless: Callable[[], bool] = lambda: False) -> None:
        """To be called after a save: does not return while the run gives up its pods.

        Steps trained after the save would be lost. Returns at once when nothing is asked for; else
        when the request is withdrawn, or its deadline is long over. Mostly the process ends here.
        On other ranks than the one that heard of the request it returns at once: they wait for
        that rank in their next collective.

        Args:
            unless: returns also when this is true, such as ``lambda: shutdown.requested``.
        """
        listener = self._listener
        while listener is not None and listener.answered is not None and not unless():
            listener.wait(_LOOK_SECONDS)

    def _can_hear(self) -> bool:
        return isinstance(self.monitor, StopClient)

    def _hear(self) -> StopListener:
        monitor = self.monitor
        assert isinstance(monitor, StopClient)
        with self._listening:
            if self._listener is None:
                self._listener = StopListener(monitor)
            return self._listener
