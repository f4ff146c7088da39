"""The one caller's side of a save: register everyone who takes part, await the commit."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import SupportsIndex, TypeVar, cast

from trainsync.api import protocol
from trainsync.api.protocol import SaveKind, SaveRequest, SaveState, SaveStatus
from trainsync.checkpoint.errors import SaveTimeoutError, aborted_error
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import (
    MonitorUnavailableError,
    NotReadyError,
    StorageUnavailableError,
)

ResultT = TypeVar("ResultT")

AWAY = (MonitorUnavailableError, NotReadyError, StorageUnavailableError)
"""The monitor, or its volume, cannot be reached: to be asked again."""

RETRY_SECONDS = 1.0
_POLL_SECONDS = 5.0  # of one question to the monitor, which answers as soon as it knows


def all_ranks(*components: str, world_size: int) -> list[tuple[str, int]]:
    """Every (component, rank): the full set of participants of a save.

    Raises:
        ValueError: ``world_size`` is not a number of ranks.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}, expected an integer of at least 1")
    return [(component, rank) for component in components for rank in range(world_size)]


def check_step(step: object, what: str) -> None:
    """Refuse what is no step; ``what`` is for the message.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative.
    """
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise TypeError(f"{what}: global_step is {step!r}, expected an integer")
    if step.__index__() < 0:
        raise ValueError(f"{what}: global_step is {step!r}, expected 0 or more")


@dataclass(frozen=True)
class Participants:
    """Everyone who writes to a step's saves, as `CheckpointCoordinator.register` takes them.

    Raises:
        ValueError: there is none, or one that cannot be; or the step is negative.
        TypeError: the step is no integer.
    """

    step: int
    state_dict: tuple[tuple[str, int], ...] = ()
    checkpoint: tuple[tuple[str, int], ...] = ()
    reuse_state_dict: bool = False

    def __post_init__(self) -> None:
        check_step(self.step, "register")
        if not self.state_dict and not self.checkpoint:
            raise ValueError(f"step {self.step}: register needs at least one participant")
        for pair in (*self.state_dict, *self.checkpoint):
            try:
                _wire([pair])
            except ValueError as error:  # pydantic's, of several lines
                raise ValueError(
                    f"step {self.step}: participant {pair!r} is refused: expected a component of "
                    "[a-z0-9_]{1,64} and a rank ≥ 0"
                ) from error

    @property
    def kinds(self) -> Iterator[SaveKind]:
        """Of the saves, in the order in which they commit."""
        if self.state_dict:
            yield SaveKind.STATE_DICT
        if self.checkpoint:
            yield SaveKind.CHECKPOINT


def register_saves(monitor: MonitorClient, participants: Participants) -> None:
    """See `CheckpointCoordinator.register`.

    Raises:
        MonitorError: the monitor refuses, or cannot be reached.
    """
    step, state_dict = participants.step, participants.state_dict
    if state_dict:
        monitor.register(
            SaveRequest(kind=SaveKind.STATE_DICT, step=step, participants=_wire(state_dict))
        )
    if participants.checkpoint:
        monitor.register(
            SaveRequest(
                kind=SaveKind.CHECKPOINT,
                step=step,
                participants=_wire(participants.checkpoint),
                reuse_state_dict=participants.reuse_state_dict or bool(state_dict),
            )
        )


async def register_before(
    monitor: MonitorClient, participants: Participants, deadline: float
) -> None:
    """`register_saves`; a monitor that is away is asked again until ``deadline``.

    Raises:
        MonitorError: the monitor refuses, or was away until then.
    """
    while True:
        try:
            return await _in_thread(partial(register_saves, monitor, participants))
        except AWAY:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise
            await asyncio.sleep(RETRY_SECONDS)


async def await_commit(
    monitor: MonitorClient,
    kind: SaveKind,
    step: int,
    deadline: float,
    meanwhile: Callable[[], object] = lambda: None,
    look: Callable[[SaveState], object] = lambda state: None,
) -> SaveStatus:
    """Wait until the save is committed, at most until ``deadline`` (`time.monotonic`).

    A monitor that is away, or whose volume is, is asked again.

    Args:
        meanwhile: called before each question to the monitor; what it raises ends the wait.
        look: called with each answer but the last, in another thread; what it raises ends the wait.

    Raises:
        SaveAbortedError: with the cause; `SaveSkippedError` when a rank skipped it.
        SaveTimeoutError: with how it stood.
        MonitorError: the monitor refuses.
    """
    question = CommitQuestion(monitor, kind, step, look)
    while (left := deadline - time.monotonic()) > 0:
        meanwhile()
        status = await _in_thread(partial(question.ask, left))
        if status is not None:
            return status
    raise question.timeout()


async def _in_thread(call: Callable[[], ResultT]) -> ResultT:
    """As `asyncio.to_thread`, but nobody waits for the thread who is cancelled, or ends the loop.

    ``asyncio.run`` waits for the threads of its executor, which here may be in a long question.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ResultT] = loop.create_future()

    def give(result: ResultT | None, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast("ResultT", result))

    def run() -> None:
        result, raised = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            raised = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(give, result, raised)

    threading.Thread(target=run, name="trainsync-await-commit", daemon=True).start()
    return await answer


class CommitQuestion:
    """Whether a save is committed yet.

    Raises:
        As `await_commit`.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        kind: SaveKind,
        step: int,
        look: Callable[[SaveState], object] = lambda state: None,
    ) -> None:
        self._monitor = monitor
        self._look = look
        self._kind = kind
        self._step = step
        self._what = f"{kind.value} of step {step}"
        self._last = "the monitor was not asked"

    def ask(self, seconds: float) -> SaveStatus | None:
        """How it was committed; None when it is open after a wait of at most ``seconds``."""
        try:
            status = self._monitor.save_status(self._kind, self._step, min(_POLL_SECONDS, seconds))
        except AWAY as error:
            self._last = str(error)
            time.sleep(min(RETRY_SECONDS, seconds))
            return None
        if status.state is SaveState.COMMITTED:
            return status
        if status.state is SaveState.ABORTED:
            cause = status.error or "no cause is known"
            raise aborted_error(f"{self._what} aborted: {cause}", cause)
        self._last = f"the monitor says {status.state.value}"
        self._look(status.state)
        return None

    def timeout(self) -> SaveTimeoutError:
        """The time is over."""
        return SaveTimeoutError(f"{self._what} was not committed in time: {self._last}")


def _wire(pairs: Iterable[tuple[str, int]]) -> list[protocol.Participant]:
    return [protocol.Participant(component=component, rank=rank) for component, rank in pairs]
