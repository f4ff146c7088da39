"""Points of a broadcast where a test may kill or stop a process, or make it fail."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

RECEIVE_PHASES: Final = (
    "prepared",
    "joining",
    "joined",
    "bucket",
    "received",
    "flipping",
    "flipped",
    "acknowledged",
)
"""In the order of a broadcast, on the explorer: the schema is taken; the group is about to be
made, and is made (only when the members changed); a bucket has come (once for each); all have; the
digest agrees and the set is about to be served; it is served; the trainer is told."""

SEND_PHASES: Final = ("prepared", "joining", "joined", "bucket", "sent", "committed")
"""The same on the trainer: the explorers took the schema; the group is about to be made, and is;
a bucket is on the wire (once for each); all have arrived; the explorers are told to serve."""


@dataclass(frozen=True)
class BroadcastHooks:
    """``phase`` is told each phase as it is reached, in the thread that reached it.

    What it raises fails the broadcast as an error of that phase would.
    """

    phase: Callable[[str], None] = lambda _: None
