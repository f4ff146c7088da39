"""What is recorded: the attributes of spans, the name of a step's root, and how many went out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Attributes = Mapping[str, str | bool | int | float]

STEP: Final = "trainsync.step"


@dataclass(frozen=True)
class TraceStats:
    """Spans of this process: ``ended`` in all, ``sent``, and ``refused`` or not answered.

    Of those that are in none of the two some still wait; the others found the queue full.
    """

    ended: int = 0
    sent: int = 0
    refused: int = 0
