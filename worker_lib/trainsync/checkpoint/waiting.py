"""Waits for a checkpoint, in the caller's thread or for an event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

from trainsync.api.protocol import SaveKind, SaveState, SaveStatus
from trainsync.checkpoint.save.registration import AWAY
from trainsync.checkpoint.save.watch import SaveWatch

ResultT = TypeVar("ResultT")

UNKNOWN_SECONDS: Final = 10.0
"""In which a registration by another process must arrive."""

SLICE_SECONDS: Final = 0.5


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
        self._unknown_until = time.monotonic() + UNKNOWN_SECONDS

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def commit(self) -> SaveStatus | None:
        """How it was committed; None without a step.

        Raises:
            What `SaveWatch.commit` raises.
            ValueError: after a while the monitor still knows of no such save: a wait would be long.
        """
        if self.step is None:
            return None
        while not self._is_coming(self.step) and not self.stop.wait(SLICE_SECONDS):
            pass
        return self.watch.commit(SaveKind.CHECKPOINT, self.step, self.deadline, self.stop)

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
            f"it ({last}), and nobody registered it; expected finish() for the newest, or a save "
            "of that step before"
        )


async def in_thread(call: Callable[[], ResultT], stop: threading.Event) -> ResultT:
    """``call()`` in a thread, as `asyncio.to_thread`, but a cancelled caller does not wait for it.

    ``asyncio.run`` waits for the threads of its executor, which here may be in a long question to
    the monitor.

    Args:
        stop: is set when the caller is gone; ``call`` then ends soon.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ResultT] = loop.create_future()

    def give(result: ResultT | None, error: BaseException | None) -> None:
        if answer.done():  # the caller is gone
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast("ResultT", result))

    def run() -> None:
        result, raised = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            raised = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(give, result, raised)

    threading.Thread(target=run, name="trainsync-await-commit", daemon=True).start()
    try:
        return await answer
    finally:
        stop.set()
