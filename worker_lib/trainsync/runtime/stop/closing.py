"""Ends a process's unfinished work when its RunContext is closed."""

import logging
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

from trainsync.checkpoint.save import ending
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import MonitorError
from trainsync.runtime.clients import HostingClient

if TYPE_CHECKING:
    from trainsync.checkpoint.coordinator import CheckpointCoordinator
    from trainsync.checkpoint.save.pipeline import SavePipeline
    from trainsync.checkpoint.save.watch import SaveWatch

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 2.0  # of a monitor that is to register a save


class Closing(Protocol):
    """A thread's work that can be closed."""

    def close(self, timeout: float) -> bool:
        """End. False if ``timeout`` seconds were not enough."""
        ...


def close_all(run: str, endings: Iterable[tuple[Closing, str]], deadline: float) -> None:
    """Close one after the other by ``deadline`` (`time.monotonic`); log what took too long.

    Args:
        endings: each with what it means when closing takes too long.
    """
    timeout = deadline - time.monotonic()
    for closing, late in endings:
        if not closing.close(max(0.0, deadline - time.monotonic())):
            logger.warning("run %s: %s after %g s", run, late, timeout)


class SaveEndings:
    """The saves of one context's coordinators; it does not keep the coordinators alive."""

    def __init__(self) -> None:
        self._writing: weakref.WeakSet[SavePipeline] = weakref.WeakSet()
        self._registering: weakref.WeakSet[SaveWatch] = weakref.WeakSet()
        self._coordinators: weakref.WeakSet[CheckpointCoordinator] = weakref.WeakSet()

    def add(self, coordinator: "CheckpointCoordinator") -> None:
        """The context made this coordinator."""
        self._writing.add(coordinator.saves)
        self._registering.add(coordinator.commits)
        self._coordinators.add(coordinator)

    def finish(
        self, run: str, monitor: MonitorClient | None, written_by: float, deadline: float
    ) -> None:
        """Let what was begun be written and registered; log what is not.

        Args:
            monitor: this process's client: a monitor that lives here is given until ``deadline``
                to commit what other ranks still write. None: other ranks are not waited for.
            written_by, deadline: of `time.monotonic`.
        """
        for_others = deadline - time.monotonic()
        unwritten = [label for saves in self._writing for label in saves.finish(written_by)]
        if unwritten:
            logger.warning(
                "run %s: not written in time, and will not commit in this attempt: %s",
                run,
                ", ".join(unwritten),
            )
        answered_by = min(deadline, time.monotonic() + _ANSWER_SECONDS)
        for watch in self._watches():
            if unanswered := watch.finish(answered_by):
                logger.warning(
                    "run %s: the monitor did not answer the registration of %s, which may not "
                    "commit",
                    run,
                    ", ".join(unanswered),
                )
        if isinstance(monitor, HostingClient):
            ranks = {saves.rank for saves in self._writing}
            try:
                # Writing may have taken this rank's time; the others have theirs all the same.
                last = min(max(written_by, deadline), time.monotonic() + for_others)
                monitor.finish(max(0.0, max(deadline, last) - time.monotonic()), ranks)
            except MonitorError as error:
                logger.warning("run %s: what was saved last may not commit: %s", run, error)

    def close(self) -> None:
        """End the threads, after `finish` and the end of the monitor's client."""
        for watch in self._watches():
            watch.close(ending.STOP_SECONDS)
        for saves in self._writing:
            saves.close(ending.STOP_SECONDS)
        for coordinator in self._coordinators:
            if coordinator.neighbour is not None:
                coordinator.neighbour.close()

    def _watches(self) -> "set[SaveWatch]":
        """The watches of coordinators, and those that managers have asked them for."""
        given = {watch for coordinator in self._coordinators for watch in coordinator.watches}
        return given | set(self._registering)
