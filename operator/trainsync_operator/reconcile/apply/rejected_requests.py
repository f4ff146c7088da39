"""Remembers requests that the API server rejected, so that no look repeats them; pure."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainsync_operator.reconcile.run import Problem

# No watch tells of a quota or an administrator.
AGAIN_SECONDS: Final = 15.0


@dataclass(frozen=True)
class _Rejection:
    asked: str
    problem: Problem
    until: datetime


class RejectedRequests:
    """Rejected requests by their subject, each until it may be made again.

    The API server's text may differ each time (request numbers, used quota). The status that
    reports it is a change of the run, and leads to the next look: without this memory that look
    would make the request again, and so on.
    """

    def __init__(self) -> None:
        self._rejections: dict[str, _Rejection] = {}

    def known(self, what: str, asked: str, now: datetime) -> Problem | None:
        """The problem, if the same was refused in the last `AGAIN_SECONDS`."""
        found = self._rejections.get(what)
        if found is None or found.asked != asked or now >= found.until:
            self._rejections.pop(what, None)
            return None
        return found.problem

    def note(self, what: str, asked: str, problem: Problem, now: datetime) -> Problem:
        """Remember a refusal of what was asked."""
        until = now + timedelta(seconds=AGAIN_SECONDS)
        self._rejections[what] = _Rejection(asked, problem, until)
        return problem
