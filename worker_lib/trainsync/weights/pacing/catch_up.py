"""Who missed a broadcast, and would hold training up if it were not sent once more. Pure.

A broadcast leaves nothing behind for those that come later. Mostly that does no harm: they get the
next version. But where training waits for explorers, and all that are left wait for weights, the
next version would never come.
"""

from typing import Final

from trainsync.weights.synchronizer.roster import REQUIRE_SYNC, Explorer
from trainsync.weights.synchronizer.state import WeightsState

_MAX_RESENDS: Final = 3  # of one step for one explorer process


class CatchUps:
    """Remembers for whom the weights of a step were sent again.

    That is done once for each connection of an explorer: what became of it shows by the next one.
    """

    def __init__(self) -> None:
        self._step = -1
        self._tried: dict[tuple[str, str], set[int]] = {}

    def due(self, state: WeightsState, step: int, sent: int | None) -> bool:
        """Whether somebody waits for weights, is connected, and was not there when they were sent.

        Args:
            step: after which the trainer stands; its weights are those that would be sent.
            sent: the last version that was. Where that is not ``step``, explorers that take part
                bring the next version in its time, and it is not sent before; unless nobody got
                what was sent last, and all of them wait for it.
        """
        if state.group is None:
            return False  # what is not broadcast can be fetched at any time
        missed = sent is not None and state.version < sent  # by everybody: it is not announced
        if sent != step and any(
            explorer.takes_part and not (missed and explorer.status == REQUIRE_SYNC)
            for explorer in state.explorers.values()
        ):
            return False
        if step != self._step:
            self._step, self._tried = step, {}
        due = False
        for name, explorer in state.explorers.items():
            absent = missed or explorer.returning or state.versions.published is None
            if absent and _lacks(explorer, step):
                links = self._tried.setdefault((name, explorer.session), set())
                if explorer.link not in links and len(links) < _MAX_RESENDS:
                    links.add(explorer.link)
                    due = True
        return due


def _lacks(explorer: Explorer, step: int) -> bool:
    """Whether it waits for weights, can be sent some, and does not only load those of ``step``."""
    return explorer.ready and explorer.status == REQUIRE_SYNC and explorer.sent < step
