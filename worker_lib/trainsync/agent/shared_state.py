"""The agent's state, shared by its threads."""

import threading
from collections.abc import Callable

from trainsync.agent.state import AgentState


class SharedState:
    """Holds the state; any thread."""

    def __init__(self) -> None:
        self._state = AgentState()
        self._changed = threading.Condition()

    @property
    def state(self) -> AgentState:
        """The present state."""
        return self._state

    def change(self, step: Callable[[AgentState], AgentState]) -> tuple[AgentState, AgentState]:
        """Replace the state by ``step`` of the state; the state before and the state after."""
        with self._changed:
            before = self._state
            self._state = after = step(before)
            self._changed.notify_all()
        return before, after

    def wait(self, seconds: float) -> None:
        """Return when something has changed, or after ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """End all waiting."""
        with self._changed:
            self._changed.notify_all()
