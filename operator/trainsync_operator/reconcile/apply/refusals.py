"""Remembers what the API server refused, so that it is not asked for at each look; pure."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainsync_operator.reconcile.run import Problem

# No watch tells of a quota or an administrator.
AGAIN_SECONDS: Final = 15.0


@dataclass(frozen=True)
class _Refusal:
    asked: str
    problem: Problem
    until: datetime


class Refusals:
    """Refusals by what was refused, each until it is asked for again.

    A refusal's text may differ each time (request numbers, used quota). The status that tells of
    it is a change of the run, and leads to the next look: without a memory that look would ask
    again, and so on.
    """

    def __init__(self) -> None:
        self._refused: dict[str, _Refusal] = {}

    def known(self, what: str, asked: str, now: datetime) -> Problem | None:
        """The problem, if the same was refused in the last `AGAIN_SECONDS`."""
        found = self._refused.get(what)
        if found is None or found.asked != asked or now >= found.until:
            self._refused.pop(what, None)
            return None
        return found.problem

    def note(self, what: str, asked: str, problem: Problem, now: datetime) -> Problem:
        """Remember a refusal of what was asked."""
        until = now + timedelta(seconds=AGAIN_SECONDS)
        self._refused[what] = _Refusal(asked, problem, until)
        return problem
