"""Who came after a broadcast, and would hold training up if it were not sent once more. Pure.

A broadcast leaves nothing behind for those that come later. Mostly that does no harm: they get the
next version. But where training waits for explorers, and all that are left wait for weights, the
next version would never come.
"""

from trainsync.weights.liveness import REQUIRE_SYNC
from trainsync.weights.publishing import PublishingState


class CatchUps:
    """Remembers for whom the weights of a step were sent again: once, whatever becomes of it."""

    def __init__(self) -> None:
        self._step = -1
        self._tried: set[tuple[str, str]] = set()

    def due(self, state: PublishingState, step: int, sent: int | None) -> bool:
        """Whether somebody waits for weights, is connected, and was not there when they were sent.

        Args:
            step: after which the trainer stands; its weights are those that would be sent.
            sent: the last version that was. Where that is not ``step``, explorers that take part
                bring the next version in its time, and it is not sent before.
        """
        if state.group is None:
            return False  # what is not broadcast can be fetched at any time
        if sent != step and any(explorer.takes_part for explorer in state.explorers.values()):
            return False
        if step != self._step:
            self._step, self._tried = step, set()
        waiting = {
            (name, explorer.session)
            for name, explorer in state.explorers.items()
            if explorer.ready
            and explorer.status == REQUIRE_SYNC
            and (explorer.returning or state.published is None)
        }
        due = not waiting <= self._tried
        self._tried |= waiting
        return due
