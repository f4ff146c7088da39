"""An agent's report of its server. Pure."""

from typing import Final

from trainsync.agent.state import AgentState, ReadinessLimits
from trainsync.api.protocol import ServerReport
from trainsync.api.status import ProofVerdict
from trainsync.storage.layout import MAX_STEP

_LONGEST_TAG: Final = 128
_LONGEST_MESSAGE: Final = 256


def report_of(
    state: AgentState,
    limits: ReadinessLimits,
    now: float,
    *,
    servers: str,
    endpoint: str | None,
    agent: str | None,
    known: str,
) -> ServerReport:
    """The report at ``now``.

    Args:
        servers, endpoint, agent, known: see `ServerReport`.
    """
    why, version, judgement = state.unready(limits, now), state.version, state.last_judgement
    present = state.judged_now
    return ServerReport(
        servers=servers,
        endpoint=endpoint,
        agent=agent,
        tag=None if state.server is None else state.server.tag[:_LONGEST_TAG],
        version=version if version is not None and version <= MAX_STEP else None,
        lag=state.lag,
        ready=why is None,
        verdict=None if judgement is None else judgement.verdict,
        proven=present is not None and present.verdict is ProofVerdict.PROVEN,
        refutations=state.refutations,
        message=_message(state, why),
        known=known,
    )


def _message(state: AgentState, why: str | None) -> str | None:
    judgement, failure = state.last_judgement, state.failure
    text = why
    if judgement is not None and judgement.verdict is ProofVerdict.REFUTED:
        text = judgement.reason
    elif why is None and failure is not None:
        text = f"{failure.outcome}: {failure.message}"
    if text is None or len(text) <= _LONGEST_MESSAGE:
        return text
    return f"{text[: _LONGEST_MESSAGE - 1]}…"
