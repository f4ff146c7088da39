"""Explorers that missed a broadcast and hold up training until it is sent once more. Pure.

A broadcast leaves no bytes behind for explorers that come later. Mostly they get the next version.
But where training waits for explorers, and all that are left wait for weights, the next version
would never come.
"""

from typing import Final

from trainsync.weights.synchronizer.roster import REQUIRE_SYNC, Explorer
from trainsync.weights.synchronizer.state import WeightsState

_MAX_RESENDS: Final = 3  # of one step for one explorer process


class CatchUps:
    """Remembers to which explorers the weights of a step were sent again.

    Once for each connection of an explorer: its fate is known by the next connection.
    """

    def __init__(self) -> None:
        self._step = -1
        self._tried: dict[tuple[str, str], set[int]] = {}

    def due(self, state: WeightsState, step: int, sent: int | None) -> bool:
        """Whether a connected explorer waits for weights and was absent when they were sent.

        Args:
            step: after which the trainer stands; its weights are those that would be sent.
            sent: the last version that was. Where that is not ``step``, explorers that take part
                bring the next version in its time, and it is not sent before; unless none got
                what was sent last, and all of them wait for it.
        """
        if state.group is None:
            return False  # the other methods let explorers fetch at any time
        missed = sent is not None and state.version < sent  # by all explorers: it is not announced
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
