"""Carries the operator's request to save from the run's status to the trainers."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from trainsync.api.protocol import FarewellState, StopNews, StopNotice
from trainsync.api.status import Phase, StopRequest, StopSave, StopSaveState
from trainsync.monitor.kube.run_reader import RunFacts

_GIVEN_UP: Final = (Phase.SUSPENDED, Phase.COMPLETE, Phase.FAILED)


class Stops:
    """The request that is in force, as the facts of the run show it.

    Args:
        changed: called when it becomes another.
    """

    def __init__(
        self,
        changed: Callable[[], None],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._changed = changed
        self._clock = clock
        self._request: StopRequest | None = None

    def see(self, facts: RunFacts) -> None:
        """The run as it is now."""
        if facts.stopping != self._request:
            self._request = facts.stopping
            self._changed()

    def news(self) -> StopNews:
        """The request for the trainers."""
        request = self._request
        if request is None:
            return StopNews(notice=None)
        left = max((request.deadline - self._clock()).total_seconds(), 0.0)
        notice = StopNotice(since=request.since, reason=request.reason, seconds_left=left)
        return StopNews(notice=notice)


def farewell(facts: RunFacts, generation: int, saved: StopSave | None) -> FarewellState:
    """The answer to a pod of ``generation`` that is told to end: wait, or go."""
    if facts.status.get("phase") in _GIVEN_UP or generation not in facts.generations.values():
        return FarewellState.GO
    request = facts.stopping
    if request is None:
        return FarewellState.UNKNOWN
    if saved is None or saved.since != request.since or saved.state is StopSaveState.SAVING:
        return FarewellState.WAIT
    return FarewellState.GO
