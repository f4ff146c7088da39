"""How the preparation of a version ended: what a server does for it before it is paused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

PREPARE: Final = "trainsync_prepare"
PREPARED: Final = "trainsync_prepared"
ABANDON: Final = "trainsync_abandon"
"""Methods of vLLM's workers: each answers at once, with `told`."""


class PreparationOutcome(StrEnum):
    """How it ended. In all cases the server serves the weights that it had."""

    PREPARED = "prepared"
    IMPOSSIBLE = "impossible"
    """The server's model or engine has no way to it."""
    NO_MEMORY = "no_memory"
    FAILED = "failed"
    LATE = "late"


@dataclass(frozen=True)
class Preparation:
    """A preparation that ended.

    Attributes:
        reason: of another outcome than ``PREPARED``.
        seconds: that it took.
    """

    outcome: PreparationOutcome
    reason: str = ""
    seconds: float = 0.0


def told(outcome: PreparationOutcome | None, reason: str = "") -> dict[str, Any]:
    """The answer of one worker; None: it goes on."""
    return {"outcome": None if outcome is None else outcome.value, "reason": reason}


def of_all(answers: Sequence[Mapping[str, Any]]) -> tuple[PreparationOutcome, str] | None:
    """The outcome for a server whose workers gave these answers; None: one goes on.

    A server is prepared once all of its workers are; else the first failure tells why it is not.

    Raises:
        ValueError: there are none, or not such ones.
    """
    if not answers:
        raise ValueError("no worker answered")
    found = []
    for answer in answers:
        if not isinstance(answer, Mapping) or not {"outcome", "reason"} <= answer.keys():
            raise ValueError(f"a worker answered {answer!r}")
        outcome = answer["outcome"]
        found.append(None if outcome is None else PreparationOutcome(outcome))
    for outcome, answer in zip(found, answers, strict=True):
        if outcome not in (None, PreparationOutcome.PREPARED):
            return outcome, str(answer["reason"])
    return None if None in found else (PreparationOutcome.PREPARED, "")
