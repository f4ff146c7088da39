"""Tell the Synchronizer of a version whose save was aborted, so that nobody waits for it.

In the process that made the Synchronizer, as `trainsync.runtime.commit_relay`.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import FencedError
from trainsync.weights import threads
from trainsync.weights.synchronizer.connection import Connection

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 5.0  # of a question to the Synchronizer, answered as soon as there is one
_SAVE_POLL_SECONDS: Final = 2.0  # of one to the monitor, answered as soon as the save has ended
_RETRY_SECONDS: Final = 0.5
_NOTE_SECONDS: Final = 10.0


class AbortRelay:
    """Asks what became of the version that the trainer sent last, until `close`.

    It asks while nobody can have that version, and asks anew after whatever failed. So an abort is
    not lost with a monitor or a Synchronizer that is made again: the monitor finds it on the disk.
    Of versions that the trainer did not send with the pace it knows nothing; nobody waits for
    those. Nothing is asked any more once the attempt is over (`FencedError`) or Ray is gone.

    Attributes:
        told: how many aborts were told.
        failed: how many questions and answers failed.
        last_error: of the last one that did.
    """

    def __init__(self, monitor: MonitorClient, synchronizer: Callable[[], Any]) -> None:
        self._monitor = monitor
        self._synchronizer = synchronizer
        self._connection: Connection | None = None
        self._committed = -1
        self._closing = threading.Event()
        self._speaking = threading.Lock()  # who holds it may speak with the Synchronizer
        self.told = 0
        self.failed = 0
        self.last_error: Exception | None = None
        self._thread = threads.start("trainsync-aborts", self._run, self._closing)

    def close(self, timeout: float) -> bool:
        """Tell of nothing from now on. False if telling goes on for ``timeout`` seconds.

        A question to the monitor is not waited for: its answer is not used.
        """
        self._closing.set()
        if not self._speaking.acquire(timeout=timeout):
            return False
        self._speaking.release()
        return True

    def _run(self) -> None:
        while not self._closing.is_set() and threads.ray_is_there():
            try:
                version = self._in_flight()
                if version is not None:
                    self._settle(version)
            except FencedError as error:
                self._note(error, "aborted versions are not told of any more")
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                if not self._closing.is_set():
                    self._note(error, "aborted versions are not told of for now")
                    self._closing.wait(_RETRY_SECONDS)

    def _in_flight(self) -> int | None:
        with self._speaking:
            if self._closing.is_set():
                return None
            actor = self._synchronizer()
            question = actor.next_in_flight.remote(self._committed, _POLL_SECONDS)
            version: int | None = threads.answer(question, self._closing.is_set)
            return version

    def _settle(self, version: int) -> None:
        """Ask once what became of it."""
        status = self._monitor.save_status(SaveKind.STATE_DICT, version, _SAVE_POLL_SECONDS)
        if status.state is SaveState.COMMITTED:
            self._committed = version  # it is announced by the other relay
        elif status.state is SaveState.ABORTED:
            self._tell(version, status.error or "no cause is known")

    def _tell(self, version: int, cause: str) -> None:
        with self._speaking:
            if self._closing.is_set():
                return
            if self._connection is None:
                self._connection = Connection(self._synchronizer(), _NOTE_SECONDS)
            self._connection.call("note_aborted", version, cause, timeout=_NOTE_SECONDS)
        self.told += 1

    def _note(self, error: Exception, what: str) -> None:
        error = getattr(error, "cause", None) or error  # without Ray's traceback of the actor
        self.failed += 1
        self.last_error = error
        logger.warning("%s: %s", what, error)
