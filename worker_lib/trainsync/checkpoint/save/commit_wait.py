"""The wait for a whole checkpoint's commit, for `CheckpointCoordinator.finish`."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from trainsync.api.protocol import SaveKind, SaveState, SaveStatus
from trainsync.checkpoint.errors import SaveTimeoutError
from trainsync.checkpoint.save.registration import AWAY
from trainsync.checkpoint.save.watch import SaveWatch

_SLICE_SECONDS: Final = 0.5


@dataclass
class CommitWait:
    """The wait for the checkpoint of ``step``; None: no step was asked for and none saved here.

    Args:
        newest: the last step that was saved or registered by this process.
        timeout: seconds.
    """

    watch: SaveWatch
    step: int | None
    newest: int | None
    timeout: float
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the caller waits no longer."""

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout:g} s, expected more than 0")
        self.step = self.newest if self.step is None else self.step
        self.deadline = time.monotonic() + self.timeout
        self._unknown_until = time.monotonic() + self.watch.times.unknown

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def commit(self) -> SaveStatus | None:
        """Wait for the commit; returns its status, or None without a step.

        Raises:
            What `SaveWatch.commit` raises.
            ValueError: after a while the monitor still knows of no such save: a wait would be long.
        """
        if self.step is None:
            return None
        while not self._is_coming(self.step) and not self.stop.wait(_SLICE_SECONDS):
            pass
        return self.watch.commit(SaveKind.CHECKPOINT, self.step, self.deadline, self.stop)

    def after_writes(self, wait_all: Callable[[float], None]) -> SaveStatus | None:
        """`commit` once ``wait_all`` has seen this process's saves written.

        It waits in short slices, so that a task that is cancelled leaves no thread behind.
        """
        while True:
            try:
                wait_all(max(0.0, min(_SLICE_SECONDS, self.left)))
                return self.commit()
            except SaveTimeoutError:
                if self.left <= 0 or self.stop.is_set():
                    raise

    def _is_coming(self, step: int) -> bool:
        """Whether that checkpoint exists, or a process saves it."""
        if self.newest is not None and step <= self.newest:
            return True
        try:
            state = self.watch.monitor.save_status(SaveKind.CHECKPOINT, step).state
        except AWAY:
            return True  # the wait for the commit asks such a monitor again
        if state is not SaveState.UNKNOWN:
            return True
        if time.monotonic() < self._unknown_until:
            return False
        last = "it saved none" if self.newest is None else f"its newest is step {self.newest}"
        raise ValueError(
            f"no checkpoint of step {step} is saved or committed: this process did not save "
            f"it ({last}), and no process registered it; expected finish() for the newest, or a "
            "save of that step before"
        )
