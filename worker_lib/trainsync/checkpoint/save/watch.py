"""Follows saves after they are written: one `SaveWatch` registers, asks, and remembers.

- `SaveWatch.register` tells the monitor of a save in the background and follows it to its commit.
- `SaveWatch.add_written` looks on the disk how a save ends that another process may have registered
  (`outcome_files`).
- `SaveWatch.commit` waits for one save in the caller's thread, and logs what it misses (`missing`).

Failures are kept until `SaveWatch.raise_failure`, each raised once.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from trainsync.api.protocol import SaveKind, SaveState, SaveStatus
from trainsync.api.spec import SAVE_DEADLINE_SECONDS, UNREGISTERED_WARNING_SECONDS
from trainsync.checkpoint.errors import (
    SaveAbortedError,
    SaveSkippedError,
    SaveTimeoutError,
    aborted_error,
)
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.missing import MissingReport
from trainsync.checkpoint.save.outcome_files import Ended, OutcomeFiles
from trainsync.checkpoint.save.places.base import SaveRecords
from trainsync.checkpoint.save.registration import AWAY, Participants, register_saves
from trainsync.checkpoint.save.threads import SerialExecutor
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import ClientClosedError
from trainsync.tracing.steps import StepTracer

logger = logging.getLogger(__name__)

LATER_SECONDS: Final = 600.0
"""A save counts as lost so long after its deadline, when the monitor aborts it and says why."""

COMMIT_SECONDS: Final = SAVE_DEADLINE_SECONDS + LATER_SECONDS

_QUESTION_SECONDS: Final = 0.5  # that `close` waits for an answer that is not used


@dataclass(frozen=True)
class WatchTimes:
    """Seconds between requests of a `SaveWatch`, and until it misses something."""

    retry: float = 1.0
    """Before a monitor that is away is asked again."""
    poll: float = 5.0
    """Of one question to the monitor, which answers as soon as it knows."""
    shared_poll: float = 1.0
    """The same, while other saves wait to be asked for."""
    first_look: float = 1.0
    """Until the first look for an outcome on the disk: by then most saves have committed."""
    unregistered: float = UNREGISTERED_WARNING_SECONDS
    """Until a save without registration, or with missing parts, is warned of."""
    unknown: float = 10.0
    """Within which another process must have registered a save that is waited for."""


TIMES: Final = WatchTimes()


@dataclass(frozen=True)
class _Failure:
    step: int
    error: Exception
    kind: SaveKind | None = None  # None: the step's saves could not be registered


@dataclass(eq=False)
class _Followed:
    """The saves of a step that `SaveWatch.register` was given."""

    participants: Participants
    tolerant: bool
    deadline: float
    open: list[SaveKind]
    registered: bool = False
    began: float = field(default_factory=time.time)
    answered: threading.Event = field(default_factory=threading.Event)  # the registration
    ended: threading.Event = field(default_factory=threading.Event)


class SaveWatch:
    """Registers saves without keeping the caller, and remembers those that did not commit.

    It asks the monitor in two threads at most, for any number of saves: a monitor may be away
    for hours. A save that a rank skipped, as it was configured to do, is no failure. Methods are
    called from one thread, but for `commit`, `register_now` and `is_pending`.

    Args:
        known: (kind, step) of saves whose failure the caller hears, or heard: it is not raised
            again. Failures that are raised here are added.
        timeout: seconds after which a save counts as lost.
        times: between requests.
        ended: called in a thread of the watch when it knows how a save ended; maybe twice.
    """

    def __init__(
        self,
        monitor: MonitorClient,
        known: set[tuple[SaveKind, int]] | None = None,
        timeout: float = COMMIT_SECONDS,
        times: WatchTimes = TIMES,
        ended: Ended = lambda kind, step, committed: None,
    ) -> None:
        self.monitor: Final = monitor
        self.known: Final = set() if known is None else known
        self.has_registered = False
        """Whether this process registers saves."""
        self.times: Final = times
        self._timeout = timeout
        self._tell_ended = ended
        self._tracer = StepTracer(monitor.incarnation)
        self._followed: list[_Followed] = []
        self._failures: list[_Failure] = []
        self._lock = threading.Lock()  # guards the failures
        # Not a daemon: a process that ends right after a save has still registered it.
        self._registering = SerialExecutor("register-saves", self._register, daemon=False)
        # A daemon: the outcome is of interest to this process alone. It asks for one at a time.
        self._following = SerialExecutor("follow-saves", self._follow, daemon=True)
        self._outcomes = OutcomeFiles(
            self._heard,
            timeout,
            first_look=times.first_look,
            unregistered=times.unregistered,
            ended=ended,
        )
        ending.know(self)

    # -- saves to watch ---------------------------------------------------------------------

    def register(
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
        self.has_registered = True
        self._followed = [save for save in self._followed if not save.ended.is_set()]
        is_silent = any(not save.answered.is_set() for save in self._followed)
        deadline = time.monotonic() + self._timeout
        save = _Followed(participants, tolerant, deadline, list(participants.kinds))
        self._registering.add(save)
        self._followed.append(save)
        if patience > 0 and not is_silent and save.answered.wait(patience):
            self.raise_refusal(participants.step)

    def register_now(
        self, participants: Participants, deadline: float, stop: threading.Event
    ) -> None:
        """Register and return; a monitor that is away is asked again until ``deadline``.

        Args:
            stop: set when the caller waits no longer.

        Raises:
            MonitorError: the monitor refuses, or was away until then.
        """
        self.has_registered = True
        while True:
            try:
                return register_saves(self.monitor, participants)
            except AWAY:
                retry = self.times.retry
                if time.monotonic() + retry > deadline or stop.wait(retry):
                    raise

    def add_written(self, kind: SaveKind, step: int, records: SaveRecords) -> None:
        """This process has written a part of that save, which another one may have registered."""
        self._outcomes.add(kind, step, records)

    def ignore_written(self) -> None:
        """Hear, from now on, only of the saves that are registered here."""
        self._outcomes.end()

    # -- their outcome ----------------------------------------------------------------------

    def commit(
        self,
        kind: SaveKind,
        step: int,
        deadline: float,
        stop: threading.Event | None = None,
        missing: MissingReport | None = None,
    ) -> SaveStatus:
        """Wait until a save is committed, at most until ``deadline`` (`time.monotonic`).

        Any process may have registered it. A monitor that is away, or whose volume is, is asked
        again.

        Args:
            stop: set when the caller waits no longer.
            missing: logs what the save misses meanwhile.

        Raises:
            SaveAbortedError: with the cause; `SaveSkippedError` when a rank skipped it.
            SaveTimeoutError: with the save's last state.
            NotRegisteredError: see `MissingReport.log`.
            MonitorError: the monitor refuses, or refused the registration of the step.
        """
        question = _Question(self.monitor, kind, step, self.times.retry)
        try:
            while (left := deadline - time.monotonic()) > 0 and not (stop and stop.is_set()):
                self.raise_refusal(step)
                status = question.ask(min(self.times.poll, left))
                if status is None:
                    continue
                if status.state is SaveState.COMMITTED:
                    return status
                if missing is not None:
                    registers_here = self.has_registered and not self.is_pending(step)
                    missing.log(status.state, registers_here=registers_here)
        except SaveAbortedError:
            self.known.add((kind, step))  # the caller hears it now
            raise
        raise question.timeout()

    def wait(self, timeout: float) -> None:
        """Wait until every save that was registered here has committed or failed.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough.
            SaveAbortedError, MonitorError: see `raise_failure`.
        """
        deadline = time.monotonic() + timeout
        for save in self._followed:
            if not save.ended.wait(max(0.0, deadline - time.monotonic())):
                raise SaveTimeoutError(
                    f"step {save.participants.step} was not committed within {timeout:g} s"
                )
        self.raise_failure()

    def is_pending(self, step: int) -> bool:
        """Whether the monitor has not answered a registration of ``step`` yet."""
        return any(
            save.participants.step == step and not save.answered.is_set() for save in self._followed
        )

    def look(self) -> None:
        """Hear of the aborts that are on the disk by now; waits half a second at most."""
        self._outcomes.look()

    def raise_failure(self) -> None:
        """Raise what went wrong since the last call, if anything did; later ones as notes.

        Raises:
            SaveAbortedError: the monitor aborted a save; with the cause.
            SaveTimeoutError: a save did not commit.
            MonitorError: the monitor refused a registration.
        """
        self._raise(lambda failure: True)

    def raise_refusal(self, step: int) -> None:
        """Raise why the saves of ``step`` could not be registered, if they could not.

        Raises:
            MonitorError: the monitor refused them.
        """
        self._raise(lambda failure: failure.step == step and failure.kind is None)

    # -- the end ----------------------------------------------------------------------------

    def finish(self, deadline: float) -> list[str]:
        """Let what was begun be registered; what is not by ``deadline``, for people."""
        for save in self._followed:
            save.answered.wait(max(0.0, deadline - time.monotonic()))
        unanswered = [save for save in self._followed if not save.answered.is_set()]
        return [f"step {save.participants.step}" for save in unanswered]

    def close(self, timeout: float) -> None:
        """Ask for nothing any more; waits ``timeout`` seconds at most for each thread to end."""
        self._registering.close(timeout)
        self._following.close(min(timeout, _QUESTION_SECONDS))
        self._outcomes.close(timeout)

    def end(self, deadline: float) -> None:
        """End the threads: the process exits."""
        self.close(min(ending.STOP_SECONDS, max(0.0, deadline - time.monotonic())))

    # -- in the background ------------------------------------------------------------------

    def _register(self, save: _Followed) -> bool:
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

    def _try_to_register(self, save: _Followed) -> None:
        register_saves(self.monitor, save.participants)
        save.registered = True
        save.answered.set()

    def _follow(self, save: _Followed) -> bool:
        """Register it, or ask once for its commit; whether it has ended."""
        try:
            if not save.registered:
                return self._register_again(save)
            question = _Question(
                self.monitor, save.open[0], save.participants.step, self.times.retry
            )
            left = save.deadline - time.monotonic()
            times = self.times
            seconds = times.shared_poll if self._following.waiting else times.poll
            status = question.ask(max(0.0, min(seconds, left)))
            if status is not None and status.state is SaveState.COMMITTED:
                self._trace(save, save.open[0])
                self._tell_ended(save.open.pop(0), save.participants.step, True)
            elif left <= 0:
                raise question.timeout()
            if save.open:
                return False
        except ClientClosedError as error:
            # The process that closed the client does not ask for the outcome of a registered save.
            self._end(save, None if save.registered else error)
        except Exception as error:  # noqa: BLE001 - kept for the caller
            self._end(save, error, save.open[0] if save.registered else None)
        else:
            self._end(save)
        return True

    def _register_again(self, save: _Followed) -> bool:
        """Always False: it has not ended. Raises what the monitor says, if that is final."""
        try:
            self._try_to_register(save)
        except AWAY:
            if time.monotonic() > save.deadline:
                raise
            time.sleep(self.times.retry)  # it was away just now, for the others as well
        return False

    def _end(
        self, save: _Followed, error: Exception | None = None, kind: SaveKind | None = None
    ) -> None:
        if isinstance(error, SaveAbortedError) and kind is not None:
            self._trace(save, kind, error)
            self._tell_ended(kind, save.participants.step, False)
        if error is not None:
            self._keep(save.participants.step, error, kind, tolerant=save.tolerant)
        save.answered.set()
        save.ended.set()

    def _trace(
        self, save: _Followed, kind: SaveKind, error: SaveAbortedError | None = None
    ) -> None:
        self._tracer.record(
            save.participants.step,
            "trainsync.save.commit",
            save.began,
            attributes={"trainsync.save.kind": kind.value},
            error=error,
        )

    def _heard(self, kind: SaveKind, step: int, cause: str) -> None:
        """The monitor aborted a save that another process may have registered."""
        what = f"{kind.value} of step {step} was aborted: {cause}"
        self._keep(step, aborted_error(what, cause), kind)

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

    def _raise(self, wanted: Callable[[_Failure], bool]) -> None:
        with self._lock:
            mine = [failure for failure in self._failures if wanted(failure)]
            self._failures = [failure for failure in self._failures if failure not in mine]
        news = []
        for failure in mine:
            if failure.kind is None:
                news.append(failure.error)
            elif (save := (failure.kind, failure.step)) not in self.known:
                self.known.add(save)
                news.append(failure.error)
        if news:
            for other in news[1:]:
                news[0].add_note(f"also: {other}")
            raise news[0]


class _Question:
    """Asks the monitor for the state of one save."""

    def __init__(self, monitor: MonitorClient, kind: SaveKind, step: int, retry: float) -> None:
        self._retry = retry
        self._monitor = monitor
        self._kind = kind
        self._step = step
        self._what = f"{kind.value} of step {step}"
        self._last = "the monitor was not asked"

    def ask(self, seconds: float) -> SaveStatus | None:
        """Its state, as soon as that is final, else after ``seconds``; None from a monitor away.

        Raises:
            SaveAbortedError: the save was aborted; with the cause.
            MonitorError: the monitor refuses.
        """
        try:
            status = self._monitor.save_status(self._kind, self._step, seconds)
        except AWAY as error:
            self._last = str(error)
            time.sleep(min(self._retry, seconds))
            return None
        if status.state is SaveState.ABORTED:
            cause = status.error or "no cause is known"
            raise aborted_error(f"{self._what} aborted: {cause}", cause)
        self._last = f"the monitor says {status.state.value}"
        return status

    def timeout(self) -> SaveTimeoutError:
        """The time is over."""
        return SaveTimeoutError(f"{self._what} was not committed in time: {self._last}")
