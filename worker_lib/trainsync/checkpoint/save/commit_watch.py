"""What becomes of saves after they are written, watched by the one process that registers them."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.api.spec import SAVE_DEADLINE_SECONDS
from trainsync.checkpoint.errors import (
    SaveAbortedError,
    SaveSkippedError,
    SaveTimeoutError,
    aborted_error,
)
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.registration import (
    AWAY,
    RETRY_SECONDS,
    CommitQuestion,
    Participants,
    register_saves,
)
from trainsync.checkpoint.save.serial_executor import SerialExecutor
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import ClientClosedError

logger = logging.getLogger(__name__)

LATER_SECONDS: Final = 600.0
"""A save counts as lost so long after its deadline, when the monitor aborts it and says why."""

COMMIT_SECONDS: Final = SAVE_DEADLINE_SECONDS + LATER_SECONDS

# Of one question to the monitor, which answers as soon as it knows.
_POLL_SECONDS: Final = 5.0
_QUESTION_SECONDS: Final = 0.5  # that who closes waits for an answer that is not used
_SHARED_POLL_SECONDS: Final = 1.0  # while other saves wait to be asked for


@dataclass(frozen=True)
class _Failure:
    step: int
    error: Exception
    kind: SaveKind | None = None  # None: it could not be registered


@dataclass(eq=False)
class _Watched:
    participants: Participants
    tolerant: bool
    deadline: float
    open: list[SaveKind]
    registered: bool = False
    answered: threading.Event = field(default_factory=threading.Event)  # the registration
    ended: threading.Event = field(default_factory=threading.Event)


class CommitWatch:
    """Registers saves without keeping the caller, and remembers those that did not commit.

    It has two threads at most, whatever the number of saves: a monitor may be away for hours.
    A save that a rank skipped, as it was configured to do, is no failure. Methods are called from
    one thread.

    Args:
        known: (kind, step) of saves whose failure the caller hears, or heard: it is not raised
            again. What is raised here is added.
        timeout: seconds after which a save counts as lost.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        known: set[tuple[SaveKind, int]] | None = None,
        timeout: float = COMMIT_SECONDS,
    ) -> None:
        self.monitor: Final = monitor
        self._known = set() if known is None else known
        self._timeout = timeout
        self._watched: list[_Watched] = []
        self._failures: list[_Failure] = []
        self._lock = threading.Lock()  # guards the failures
        # Not a daemon: a process that ends right after a save has still registered it.
        self._registering = SerialExecutor("register-saves", self._register, daemon=False)
        # A daemon: the outcome is of interest to this process alone. It asks for one at a time.
        self._following = SerialExecutor("follow-saves", self._follow, daemon=True)
        ending.know(self)

    def begin(
        self, participants: Participants, *, tolerant: bool = False, patience: float = 0.0
    ) -> None:
        """Register in the background, then wait there for the commit.

        Args:
            tolerant: an abort is logged, not raised.
            patience: seconds to wait for the monitor's answer, whose refusal is then raised here;
                none when it has not answered an earlier registration yet. With 0 nothing is
                raised here.

        Raises:
            MonitorError: the monitor refuses, and said so in time.
            RuntimeError: the system has no thread left.
        """
        self._watched = [save for save in self._watched if not save.ended.is_set()]
        is_silent = any(not save.answered.is_set() for save in self._watched)
        deadline = time.monotonic() + self._timeout
        save = _Watched(participants, tolerant, deadline, list(participants.kinds))
        self._registering.add(save)
        self._watched.append(save)
        if patience > 0 and not is_silent and save.answered.wait(patience):
            self.raise_refusal(participants.step)

    def is_pending(self, step: int) -> bool:
        """Whether the monitor has not answered a registration of ``step`` yet."""
        return any(
            save.participants.step == step and not save.answered.is_set() for save in self._watched
        )

    def raise_refusal(self, step: int) -> None:
        """Raise why the saves of ``step`` could not be registered, if they could not.

        Raises:
            MonitorError: the monitor refused them.
        """
        self._raise(lambda failure: failure.step == step and failure.kind is None)

    def wait(self, timeout: float) -> None:
        """Wait until every save so far has committed or failed.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough.
            SaveAbortedError, MonitorError: see `raise_failure`.
        """
        deadline = time.monotonic() + timeout
        for save in self._watched:
            if not save.ended.wait(max(0.0, deadline - time.monotonic())):
                raise SaveTimeoutError(
                    f"step {save.participants.step} was not committed within {timeout:g} s"
                )
        self.raise_failure()

    def finish(self, deadline: float) -> list[str]:
        """Let what was begun be registered; what is not by ``deadline``, for people."""
        for save in self._watched:
            save.answered.wait(max(0.0, deadline - time.monotonic()))
        unanswered = [save for save in self._watched if not save.answered.is_set()]
        return [f"step {save.participants.step}" for save in unanswered]

    def close(self, timeout: float) -> None:
        """Ask for nothing any more; waits ``timeout`` seconds at most for a question to end."""
        self._registering.close(timeout)
        self._following.close(min(timeout, _QUESTION_SECONDS))

    def end(self, deadline: float) -> None:
        """The process exits."""
        self.close(min(ending.STOP_SECONDS, max(0.0, deadline - time.monotonic())))

    def raise_failure(self) -> None:
        """Raise what went wrong since the last call, if anything did; later ones as notes.

        Raises:
            SaveAbortedError: the monitor aborted a save; with the cause.
            SaveTimeoutError: a save did not commit.
            MonitorError: the monitor refused a registration.
        """
        self._raise(lambda failure: True)

    def heard(self, kind: SaveKind, step: int, cause: str) -> None:
        """The monitor aborted a save that another process may have registered. From any thread."""
        what = f"{kind.value} of step {step} was aborted: {cause}"
        self._keep(step, aborted_error(what, cause), kind)

    def _raise(self, wanted: Callable[[_Failure], bool]) -> None:
        with self._lock:
            mine = [failure for failure in self._failures if wanted(failure)]
            self._failures = [failure for failure in self._failures if failure not in mine]
        news = []
        for failure in mine:
            if failure.kind is None:
                news.append(failure.error)
            elif (save := (failure.kind, failure.step)) not in self._known:
                self._known.add(save)
                news.append(failure.error)
        if news:
            for other in news[1:]:
                news[0].add_note(f"also: {other}")
            raise news[0]

    def _register(self, save: _Watched) -> bool:
        """Try once to register it, and let it be followed; always over."""
        following = [save]
        try:
            try:
                self._try_to_register(save)
            except AWAY as error:
                # The others would hear the same, and would keep a process that ends.
                following += self._registering.take()
                steps = ", ".join(str(other.participants.step) for other in following)
                logger.warning("not registered yet: step %s: %s", steps, error)
            self._following.add(*following)
        except Exception as error:  # noqa: BLE001 - kept for the caller
            self._end(save, error)
        return True

    def _try_to_register(self, save: _Watched) -> None:
        register_saves(self.monitor, save.participants)
        save.registered = True
        save.answered.set()

    def _follow(self, save: _Watched) -> bool:
        """Go on with it for a moment: register it, or ask for its commit; whether it has ended."""
        try:
            if not save.registered:
                return self._register_again(save)
            question = CommitQuestion(self.monitor, save.open[0], save.participants.step)
            left = save.deadline - time.monotonic()
            seconds = _SHARED_POLL_SECONDS if self._following.waiting else _POLL_SECONDS
            if question.ask(max(0.0, min(seconds, left))) is not None:
                del save.open[0]
            elif left <= 0:
                raise question.timeout()
            if save.open:
                return False
        except ClientClosedError as error:
            # Whoever closed the client does not ask what became of what was registered.
            self._end(save, None if save.registered else error)
        except Exception as error:  # noqa: BLE001 - kept for the caller
            self._end(save, error, save.open[0] if save.registered else None)
        else:
            self._end(save)
        return True

    def _register_again(self, save: _Watched) -> bool:
        """Always False: it has not ended. Raises what the monitor says, if that is final."""
        try:
            self._try_to_register(save)
        except AWAY:
            if time.monotonic() > save.deadline:
                raise
            time.sleep(RETRY_SECONDS)  # it was away just now, for the others as well
        return False

    def _end(
        self, save: _Watched, error: Exception | None = None, kind: SaveKind | None = None
    ) -> None:
        if error is not None:
            self._keep(save.participants.step, error, kind, tolerant=save.tolerant)
        save.answered.set()
        save.ended.set()

    def _keep(
        self, step: int, error: Exception, kind: SaveKind | None, *, tolerant: bool = False
    ) -> None:
        if isinstance(error, SaveSkippedError):
            logger.warning("step %d: %s", step, error)
            return
        logger.error("step %d: %s", step, error)
        if not (tolerant and isinstance(error, SaveAbortedError)):
            with self._lock:
                self._failures.append(_Failure(step, error, kind))
