"""The relays between the monitor and the Synchronizer, in the process that made the Synchronizer.

The actor makes no calls itself: its event loop stays free, and it needs no token. `WeightsRelay`
sends its reports to the monitor; with ``sync.method: checkpoint`` `CommitRelay` and `AbortRelay`
tell it what the monitor decides about versions.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import ray

from trainsync.api.protocol import CommitNotice, SaveKind, SaveState, WeightsReport
from trainsync.monitor.client.base import CommitClient, MonitorClient
from trainsync.monitor.errors import FencedError
from trainsync.weights import threads
from trainsync.weights.errors import (
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
)
from trainsync.weights.synchronizer.connection import SynchronizerConnection
from trainsync.weights.versions import Announcement, CheckpointLocation, Published

logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 0.5
_COMMIT_POLL_SECONDS: Final = 2.0  # the monitor answers as soon as there is a commit
_SAVE_POLL_SECONDS: Final = 2.0  # the monitor answers as soon as the save has ended
_VERSION_POLL_SECONDS: Final = 5.0  # the Synchronizer answers as soon as a version is in flight
_REPORT_POLL_SECONDS: Final = 5.0  # the Synchronizer answers as soon as something changes
_REPORT_RETRY_SECONDS: Final = 5.0
_NEW_ACTOR_SECONDS: Final = 0.2  # between two looks for the actor that replaces one that died
_CALL_SECONDS: Final = 10.0
_NEVER: Final = (StaleVersionError, SupersededTrainerError, InconsistentUploadError)


class Relay:
    """Passes on one answer at a time until `close`; a subclass has the question, in `_pass_on`.

    What fails is logged and counted, and is asked again. The thread ends when the attempt is over
    (`FencedError`) or Ray is gone. A subclass sets its own attributes before it calls this
    ``__init__``, which starts the thread.

    Args:
        name: of the thread.
        undone: what does not happen while this fails, for the log: "commits are not announced".
        retry_seconds: between a failure and the next question.

    Attributes:
        failed: how many questions and answers failed.
        last_error: of the last one that did.
    """

    def __init__(self, name: str, undone: str, retry_seconds: float = _RETRY_SECONDS) -> None:
        self._undone = undone
        self._retry_seconds = retry_seconds
        self._closing = threading.Event()
        self._passing_on = threading.Lock()  # held while an answer is passed on
        self.failed = 0
        self.last_error: BaseException | None = None
        self._thread = threads.start(name, self._run, self._closing)

    def close(self, timeout: float) -> bool:
        """Pass on nothing from now on. False if that goes on for ``timeout`` seconds.

        A question that is being asked is not waited for: its answer is not used.
        """
        self._closing.set()
        if not self._passing_on.acquire(timeout=timeout):
            return False
        self._passing_on.release()
        return True

    @property
    def running(self) -> bool:
        """Whether the thread goes on."""
        return self._thread.is_alive()

    def _pass_on(self) -> None:
        """Ask once, and pass on the answer."""
        raise NotImplementedError

    def _end(self) -> None:
        """Do, in the thread, the work that is left when `close` was called."""

    @contextmanager
    def _while_open(self) -> Iterator[bool]:
        """Around what `close` waits for; gives False when it was called already."""
        with self._passing_on:
            yield not self._closing.is_set()

    def _run(self) -> None:
        while not self._closing.is_set() and threads.ray_is_there():
            try:
                self._pass_on()
            except FencedError as error:
                self._note(error, f"{self._undone} any more")
                return
            except Exception as error:  # noqa: BLE001 - training goes on after any error
                if not self._closing.is_set():
                    self._note(error, f"{self._undone} for now")
                    self._closing.wait(self._retry_seconds)
        if threads.ray_is_there():
            self._end()

    def _note(self, error: BaseException, what: str) -> None:
        error = getattr(error, "cause", None) or error  # without Ray's traceback of the actor
        self.failed += 1
        self.last_error = error
        logger.warning("%s: %s", what, error)


class WeightsRelay(Relay):
    """Asks the Synchronizer for its newest report and sends it, one at a time, until `close`.

    A report that cannot be sent is logged and counted, and the next one is tried. When the actor
    died, the one that replaces it is asked. See `Relay`.

    Args:
        synchronizer: gives the handle of the present actor.
        send: sends one report; bounded in time.

    Attributes:
        sent: how many reports were sent.
    """

    def __init__(
        self,
        synchronizer: Callable[[], Any],
        send: Callable[[WeightsReport], None],
        retry_seconds: float = _REPORT_RETRY_SECONDS,
    ) -> None:
        self._synchronizer = synchronizer
        self._send = send
        self._seen = 0
        self.sent = 0
        undone = "weights are not reported to the monitor"
        super().__init__("trainsync-weights", undone, retry_seconds)

    def close(self, timeout: float) -> bool:
        """Send what is new, then end. False if ``timeout`` seconds were not enough."""
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _pass_on(self, seconds: float = _REPORT_POLL_SECONDS) -> None:
        try:
            answer = self._ask(self._seen, seconds)
        except ray.exceptions.RayActorError as error:
            self.last_error = error
            self._seen = 0  # a new actor counts from 0
            self._closing.wait(_NEW_ACTOR_SECONDS)
            return
        if answer is None:
            return
        self._seen, report = answer
        try:
            self._send(report)
        except Exception as error:  # noqa: BLE001 - training goes on after any error
            self._note(error, f"a report of version {report.trainer_version} was not sent")
        else:
            self.sent += 1

    def _end(self) -> None:
        try:
            self._pass_on(0.0)
        except Exception as error:  # noqa: BLE001 - no report follows that could be late
            self.last_error = error

    def _ask(self, seen: int, seconds: float) -> tuple[int, WeightsReport] | None:
        """One question; given up when `close` is called meanwhile."""
        reference = self._synchronizer().next_report.remote(seen, seconds)
        answer: tuple[int, WeightsReport] | None = threads.answer(
            reference, lambda: self._closing.is_set() and seconds > 0
        )
        return answer


class CommitRelay(Relay):
    """Asks the monitor for the next commit and announces it, one at a time, until `close`.

    A monitor that is away, or a Synchronizer that is being rebuilt, is asked again; of what was
    committed meanwhile the newest alone is announced then. See `Relay`.

    Attributes:
        announced: how many commits were announced.
    """

    def __init__(self, monitor: CommitClient, synchronizer: Callable[[], Any]) -> None:
        self._monitor = monitor
        self._synchronizer = synchronizer
        self._connection: SynchronizerConnection | None = None
        self._position = (-1, -1)
        self.announced = 0
        super().__init__("trainsync-commits", "commits are not announced")

    def _pass_on(self) -> None:
        notice = self._monitor.newer_commit(
            SaveKind.STATE_DICT, self._position, _COMMIT_POLL_SECONDS
        )
        if notice is not None:
            self._announce(notice)

    def _announce(self, notice: CommitNotice) -> None:
        location = CheckpointLocation(
            notice.path, notice.manifest_digest, notice.attempt, notice.step
        )
        with self._while_open() as allowed:
            if not allowed:
                return
            if self._connection is None:
                self._connection = SynchronizerConnection(self._synchronizer(), _CALL_SECONDS)
            try:
                # No seconds: what explorers wait for begins with the commit.
                announcement = Announcement(
                    Published.saved(notice.step, notice.manifest_digest, notice.bytes, location),
                    again=True,  # an answer that was lost is no error
                )
                self._connection.call("announce", announcement, timeout=_CALL_SECONDS)
            except _NEVER as error:
                self._note(error, f"step {notice.step} is not announced")
            else:
                self.announced += 1
        self._position = (notice.attempt, notice.step)


class AbortRelay(Relay):
    """Asks what became of the version that the trainer sent last, until `close`.

    It asks while no explorer can have that version. An abort is not lost with a monitor or a
    Synchronizer that is made again: the monitor finds the abort on the disk. Versions that the
    trainer did not send through its pace are not asked for; no explorer waits for those. See
    `Relay`.

    Attributes:
        told: how many aborts were told.
    """

    def __init__(self, monitor: MonitorClient, synchronizer: Callable[[], Any]) -> None:
        self._monitor = monitor
        self._synchronizer = synchronizer
        self._connection: SynchronizerConnection | None = None
        self._committed = -1
        self.told = 0
        super().__init__("trainsync-aborts", "aborted versions are not told of")

    def _pass_on(self) -> None:
        version = self._in_flight()
        if version is not None:
            self._settle(version)

    def _in_flight(self) -> int | None:
        with self._while_open() as allowed:
            if not allowed:
                return None
            actor = self._synchronizer()
            question = actor.next_in_flight.remote(self._committed, _VERSION_POLL_SECONDS)
            version: int | None = threads.answer(question, self._closing.is_set)
            return version

    def _settle(self, version: int) -> None:
        """Ask the monitor once what became of the version's save."""
        status = self._monitor.save_status(SaveKind.STATE_DICT, version, _SAVE_POLL_SECONDS)
        if status.state is SaveState.COMMITTED:
            self._committed = version  # `CommitRelay` announces it
        elif status.state is SaveState.ABORTED:
            self._tell(version, status.error or "no cause is known")

    def _tell(self, version: int, cause: str) -> None:
        with self._while_open() as allowed:
            if not allowed:
                return
            if self._connection is None:
                self._connection = SynchronizerConnection(self._synchronizer(), _CALL_SECONDS)
            self._connection.call("note_aborted", version, cause, timeout=_CALL_SECONDS)
        self.told += 1
