"""Gather weights on all trainer ranks, in a thread, so that the wait for a collective has an end.

A collective that lost a member may never return, and nothing can interrupt it. In a thread of its
own it holds up only that thread: the caller gets an error in time.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, Self, TypeVar

import torch

from trainsync.dist.agreement import Agreement
from trainsync.engines.errors import GatherFailedError, TrainerRankFailedError
from trainsync.weights.transports.broadcast.deadlines import Deadlines

Value = TypeVar("Value")  # a tensor, or what else comes under a weight's name
Report = TypeVar("Report")
Gather = Callable[[], Iterator[tuple[str, Value]]]

# What rank 0 says to the others.
_PASS: Final = 1  # gather every weight along with me
_DONE: Final = 2
_FAILED: Final = 3

# More than a broadcaster may be late.
_LATE_SECONDS: Final = 5.0
# Between two looks at whether rank 0 speaks, while a rank gathers along.
_LOOK_SECONDS: Final = 0.02


class GatherAhead(Generic[Value]):
    """An iterator over gathered weights, whose next one is gathered while the last one is used.

    Besides the weight that was given last it holds at most one; none after a wait that took too
    long, when the thread gathers along to the end for the sake of the other ranks.

    Args:
        gather: makes the inner iterator, which is used in a thread, without gradients, on the
            caller's device and stream.
        seconds: how long `next` waits at most.
    """

    def __init__(self, gather: Gather[Value], seconds: float) -> None:
        self._seconds = seconds
        self._ready: queue.SimpleQueue[tuple[str, Value] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._room = threading.Semaphore()
        self._over = False
        self._first: tuple[str, Value] | None = None
        _in_thread(self._run, gather)

    def begin(self, seconds: float) -> None:
        """Wait for the first weight, which may take longer: a model may have to be loaded for it.

        Raises:
            GatherFailedError: see `__next__`.
        """
        if self._first is None:
            with contextlib.suppress(StopIteration):
                self._first = self._take(seconds)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Value]:
        """The next weight.

        Raises:
            GatherFailedError: it did not come in time, or the inner iterator raised.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return self._take(self._seconds)

    def _take(self, seconds: float) -> tuple[str, Value]:
        if self._over:
            raise StopIteration
        try:
            item = self._ready.get(timeout=seconds)
        except queue.Empty:
            self.abandon()
            raise GatherFailedError(
                f"a weight was not gathered within {seconds:.3g} s: a trainer rank is gone, "
                "was stopped or does not come along"
            ) from None
        if isinstance(item, tuple):
            self._room.release()
            return item
        self._over = True
        if item is None:
            raise StopIteration
        raise _failed(item)

    def drain(self, seconds: float) -> None:
        """Read what is left, so that no other rank waits for this one.

        Raises:
            GatherFailedError: see `__next__`, or there was more after ``seconds``.
        """
        end = time.monotonic() + seconds
        for _ in self:
            if time.monotonic() > end:
                self.abandon()
                raise GatherFailedError(f"the weights were not gathered within {seconds:.3g} s")

    def abandon(self) -> None:
        """Stop reading: the thread gathers along to the end, and keeps nothing."""
        self._over = True
        self._first = None
        self._room.release()
        self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    def _give(self, item: tuple[str, Value] | BaseException | None) -> None:
        self._ready.put(item)
        if self._over:  # abandoned; if that comes after this look, `abandon` forgets it
            self._forget()

    def _run(self, enter: Callable[[], None], gather: Gather[Value]) -> None:
        try:
            enter()
            with torch.no_grad():
                weights = gather()
                while True:
                    if not self._over:
                        self._room.acquire()
                    item = next(weights, None)
                    if item is None:
                        break
                    _settle()
                    self._give(item)
                    del item  # the reader owns it now
            self._give(None)
        except BaseException as error:  # noqa: BLE001 - raised to the waiting caller
            self._give(error)


class GatherAlong:
    """Take part in another rank's gathering, in a thread, and keep nothing.

    Args:
        gather: see `GatherAhead`.
    """

    def __init__(self, gather: Gather[Any]) -> None:
        self._ended = threading.Event()
        self._problem: BaseException | None = None
        _in_thread(self._run, gather)

    def wait(self, seconds: float) -> bool:
        """Whether it is over, after at most ``seconds``."""
        return self._ended.wait(seconds)

    @property
    def problem(self) -> GatherFailedError | None:
        """The error of the gathering; None while it goes well."""
        return None if self._problem is None else _failed(self._problem)

    def _run(self, enter: Callable[[], None], gather: Gather[Any]) -> None:
        try:
            enter()
            with torch.no_grad():
                for _ in gather():
                    pass
            _settle()
        except BaseException as error:  # noqa: BLE001 - `problem` tells of it
            self._problem = error
        self._ended.set()


class GatherTogether(Generic[Value]):
    """One broadcast of gathered weights: rank 0 leads, and the other ranks follow.

    Every rank makes one, and then calls `lead` or `follow`, which end in time also when another
    rank dies or stops.

    Args:
        gather: see `GatherAhead`; of the same weights each time.
        deadlines: of the broadcast.
        doing: the operation, for error messages.

    Raises:
        TrainerRankFailedError: another rank did not come within ``deadlines.whole``.
    """

    def __init__(
        self, gather: Gather[Value], ranks: Agreement, deadlines: Deadlines, doing: str
    ) -> None:
        self._gather = gather
        self._ranks = ranks
        self._deadlines = deadlines
        self._doing = doing
        self._gathered: GatherAhead[Value] | None = None
        self._ranks.agree("", None, doing, deadlines.whole)
        late = deadlines.connect + _LATE_SECONDS
        self._end = time.monotonic() + deadlines.whole + late

    # -- rank 0 ---------------------------------------------------------------------------

    def lead(self, send: Callable[[Callable[[], GatherAhead[Value]]], Report]) -> Report:
        """Let ``send`` have the weights as often as it asks for them; returns its report.

        Raises:
            TrainerRankFailedError: another rank failed, or is gone.
            GatherFailedError: see `GatherAhead`. And what ``send`` raises.
        """
        try:
            report = send(self._gather_again)
            self._finish_pass()
        except TrainerRankFailedError:
            raise  # every rank that lives knows
        except BaseException as error:
            self._give_up(error)
            raise
        self._say(_DONE, None, self._left())
        return report

    def _gather_again(self) -> GatherAhead[Value]:
        self._finish_pass()
        self._say(_PASS, None, self._left())
        self._gathered = GatherAhead(self._gather, self._deadlines.bucket)
        self._gathered.begin(min(self._left(), self._deadlines.whole))
        return self._gathered

    def _finish_pass(self) -> None:
        """Let no rank wait in a pass that was left in the middle."""
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.drain(self._left())

    def _give_up(self, error: BaseException) -> None:
        with contextlib.suppress(GatherFailedError):  # then the others do not wait in it either
            self._finish_pass()
        try:
            self._say(_FAILED, error, self._deadlines.bucket)
        except TrainerRankFailedError as other:
            error.add_note(str(other))

    def _say(self, word: int, problem: BaseException | None, seconds: float) -> None:
        self._ranks.say(word).get(seconds, self._doing)
        self._ranks.agree("", problem, self._doing, seconds)

    # -- the other ranks ------------------------------------------------------------------

    def follow(self) -> None:
        """Gather along until rank 0 is done.

        Raises:
            TrainerRankFailedError: another rank failed, or is gone.
            GatherFailedError: a weight could not be gathered on this rank.
        """
        along: GatherAlong | None = None
        while True:
            word = self._hear(along)
            problem = None if along is None else along.problem
            self._ranks.agree("", problem, self._doing, self._left())
            if word == _DONE:
                return
            along = GatherAlong(self._gather)

    def _hear(self, along: GatherAlong | None) -> int:
        coming = self._ranks.listen()
        if along is not None:
            while (
                not along.wait(_LOOK_SECONDS) and not coming.over and time.monotonic() < self._end
            ):
                pass
        word = coming.get(self._left(), self._doing)
        if along is not None and word != _FAILED and not along.wait(self._deadlines.bucket):
            raise GatherFailedError("rank 0 has gathered every weight, and this rank has not")
        return word

    # -- both -----------------------------------------------------------------------------

    def _left(self) -> float:
        return max(_LOOK_SECONDS, self._end - time.monotonic())


def _failed(error: BaseException) -> GatherFailedError:
    failed = GatherFailedError(f"a weight could not be gathered: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def _in_thread(
    target: Callable[[Callable[[], None], Gather[Any]], None], gather: Gather[Any]
) -> None:
    arguments = (_here(), gather)
    threading.Thread(target=target, args=arguments, name="trainsync-gather", daemon=True).start()


def _here() -> Callable[[], None]:
    """A context in which another thread uses the device and the stream of this one."""
    if not torch.accelerator.is_available():
        return lambda: None
    stream: Any = torch.accelerator.current_stream()
    return lambda: torch.accelerator.set_stream(stream)


def _settle() -> None:
    """Let the collective end before another thread looks at what it gives."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()
