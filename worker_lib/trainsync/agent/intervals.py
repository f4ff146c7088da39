"""How often an agent looks and asks, and how long it waits, in seconds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AgentIntervals:
    """The intervals and deadlines of an `Agent`; a deployment needs no others.

    Attributes:
        cycle: between two decisions while nothing changes.
        feed: of one question for a newer version.
        retry: before the feed or the monitor is asked again after a failure; doubled each time.
        look: between two looks at the server.
        answer: within which a server answers, between two steps of its model.
        stop: within which the threads have to end.
        unhinted: between two looks at the directory while the monitor tells of versions: a hint
            that is lost costs no more.
        calm, busy: a report waits so long at the monitor for news; busy while the state changes.
        stall: without a byte from a fellow, after which the next source is taken.
        fellows: between two questions for other agents.
        host: between two questions to an agent of another host of the engine.
        longest_retry: the longest wait for a monitor that does not answer.
    """

    cycle: float = 0.5
    feed: float = 1.0
    retry: float = 1.0
    look: float = 1.0
    answer: float = 10.0
    stop: float = 10.0
    unhinted: float = 15.0
    calm: float = 5.0
    busy: float = 1.0
    longest_retry: float = 10.0
    stall: float = 5.0
    fellows: float = 5.0
    host: float = 0.2


DEFAULT_INTERVALS = AgentIntervals()
