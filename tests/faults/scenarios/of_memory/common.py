"""Steps shared by the scenarios of memory."""

import signal
from collections.abc import Sequence

from tests.faults.memory.promises import Tier, check_answered
from tests.faults.memory.scene import Attempt
from tests.faults.processes import BrokenError

APART = ((0, 1), (0, 1), (0, 1, 2))
"""The number of each rank's pod: one rank in each."""
PODS = (*APART, (0, 0, 1), (0, 0))


def from_memory(pods: Sequence[int]) -> dict[int, tuple[Tier, ...]]:
    """Every rank must read from its pod's memory."""
    return dict.fromkeys(range(len(pods)), (Tier.MEMORY,))


def await_death(attempt: Attempt, victim: int) -> None:
    """Wait until the rank has killed itself."""
    child = attempt.ranks[victim]
    said, value = child.listen()
    while said != "ended":
        said, value = child.listen()
    if value != -signal.SIGKILL:
        raise BrokenError(f"{child.name} was not killed: it ended with {value}")


def check_survivors(attempt: Attempt, victim: int) -> None:
    """The others save, and are not held up by a rank that is gone, or stands still."""
    for rank, child in enumerate(attempt.ranks):
        if rank != victim:
            check_answered("a save", child.expect("saved")[1])
            child.tell("written")
            check_answered("writing a save", child.expect("written")[1])
