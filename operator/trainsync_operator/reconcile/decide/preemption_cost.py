"""What a preemption of a run would cost now, as a boost of its priority in Kueue's queue; pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainsync.api.status import Phase


@dataclass(frozen=True)
class BoostScale:
    """How GPU-seconds become a boost.

    Attributes:
        highest: the largest boost; below the distance of two priority classes it never lets a run
            pass one of a higher class.
        unit: GPU-seconds at risk that count as 1; each doubling counts as one more.
    """

    highest: int
    unit: int


def priority_boost(status: Mapping[str, Any], scale: BoostScale) -> int:
    """The boost of a run with this status, from 0 to `BoostScale.highest`.

    The run that has the least at risk keeps the lowest priority, so that it is preempted first.
    Nothing is at risk before a run trains, after a commit, and while a run is stopped: then it is
    0, and the run waits in the queue with the priority of its class. Seconds count where a run
    asks for no GPU.
    """
    at_risk = status.get("atRisk") or {}
    if status.get("phase") != Phase.RUNNING:
        return 0
    cost = at_risk.get("gpuSeconds") or at_risk.get("seconds") or 0
    return min(scale.highest, int(math.log2(1 + cost / scale.unit)))
