"""Proofs on request, of weights that the server has already."""

import threading
from dataclasses import dataclass, field
from typing import Any, Final

from trainsync.agent.admission.judgement import Judgement
from trainsync.agent.shared_state import SharedState

WAIT_SECONDS: Final = 12.0
"""A request waits so long: the command line's own deadline is 15 s."""


@dataclass
class ProofRequest:
    """One question, which the follower answers.

    Attributes:
        taken: the follower has begun.
        judgement: None: the server's weights could not be compared.
        reason: of a missing judgement.
    """

    taken: bool = False
    judgement: Judgement | None = None
    reason: str | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    def answer(self, judgement: Judgement | None, reason: str | None = None) -> None:
        """Tell the thread that asked."""
        self.judgement, self.reason = judgement, reason
        self.answered.set()


class ProofRequests:
    """From threads that ask to the one that proves; one request at a time."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._asking = threading.Lock()
        self._changing = threading.Lock()
        self._pending: ProofRequest | None = None

    def ask(self, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """Let the server's weights be compared with their proof, now; the outcome, for people.

        Args:
            seconds: for the answer.
        """
        if not self._asking.acquire(blocking=False):
            return _told(self._shared, None, "another request for a proof waits for its answer")
        try:
            request = ProofRequest()
            self._put(request)
            self._shared.wake()
            in_time = request.answered.wait(seconds)
            self._put(None)
            if not in_time:
                late = (
                    "the comparison goes on and is not over"
                    if request.taken
                    else "the agent has not come to it"
                )
                why = f"{late} within {seconds:g} s: see its /status.json"
                return _told(self._shared, None, why)
            return _told(self._shared, request.judgement, request.reason)
        finally:
            self._asking.release()

    def take(self) -> ProofRequest | None:
        """The request that waits; None: there is none."""
        with self._changing:  # else a request that comes just now may be lost
            request, self._pending = self._pending, None
            if request is not None:
                request.taken = True
        return request

    def _put(self, request: ProofRequest | None) -> None:
        with self._changing:
            self._pending = request


def _told(shared: SharedState, judgement: Judgement | None, reason: str | None) -> dict[str, Any]:
    server = shared.state.server
    if judgement is None:
        has = None if server is None else server.tag
        return {"version": has, "verdict": None, "reason": reason}
    return {
        "version": judgement.tag,
        "verdict": judgement.verdict.value,
        "reason": judgement.reason,
        "typicalNats": judgement.typical,
        "largestNats": judgement.largest,
    }
