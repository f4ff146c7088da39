"""How the Synchronizer's actor tells the monitor about weights, without blocking its loop."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainsync.api.protocol import WeightsReport
from trainsync.monitor.sender import LatestWinsSender

if TYPE_CHECKING:
    from trainsync.runtime.context import RunContext


class WeightsReporting:
    """Pickled into the actor's process, and called there: returns a function that never blocks."""

    def __init__(self, context: "RunContext") -> None:
        self._context = context

    def __call__(self) -> Callable[[WeightsReport], None]:
        return LatestWinsSender("trainsync-weights", self._context.monitor.report_weights).submit
