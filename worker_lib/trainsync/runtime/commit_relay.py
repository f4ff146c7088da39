"""Tell the Synchronizer of every state dict that is committed, as soon as it is.

In the process that made the Synchronizer, which knows the monitor; the actor itself talks to
nobody.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from trainsync.api.protocol import CommitNotice, SaveKind
from trainsync.monitor.client.base import CommitClient
from trainsync.monitor.errors import FencedError
from trainsync.weights import threads
from trainsync.weights.errors import (
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
)
from trainsync.weights.synchronizer.connection import Connection
from trainsync.weights.versions import Announcement, CheckpointLocation, Published

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 2.0  # of one question, which is answered as soon as there is a commit
_RETRY_SECONDS: Final = 0.5
_ANNOUNCE_SECONDS: Final = 10.0
_NEVER: Final = (StaleVersionError, SupersededTrainerError, InconsistentUploadError)


class CommitRelay:
    """Asks the monitor for the next commit and announces it, one at a time, until `close`.

    A monitor that is away, or a Synchronizer that is being rebuilt, is asked again; what was
    committed meanwhile is announced then, the newest alone. Nothing is asked any more once the
    attempt is over (`FencedError`) or Ray is gone.

    Attributes:
        announced: how many were.
        failed: how many questions and announcements failed.
        last_error: of the last one that did.
    """

    def __init__(self, monitor: CommitClient, synchronizer: Callable[[], Any]) -> None:
        self._monitor = monitor
        self._synchronizer = synchronizer
        self._connection: Connection | None = None
        self._position = (-1, -1)
        self._closing = threading.Event()
        self._announcing = threading.Lock()  # who holds it may speak with the Synchronizer
        self.announced = 0
        self.failed = 0
        self.last_error: Exception | None = None
        self._thread = threads.start("trainsync-commits", self._run, self._closing)

    def close(self, timeout: float) -> bool:
        """Announce nothing from now on. False if an announcement goes on for ``timeout`` seconds.

        A question that is being asked is not waited for: its answer is not used.
        """
        self._closing.set()
        if not self._announcing.acquire(timeout=timeout):
            return False
        self._announcing.release()
        return True

    def _run(self) -> None:
        while not self._closing.is_set() and threads.ray_is_there():
            try:
                notice = self._monitor.newer_commit(
                    SaveKind.STATE_DICT, self._position, _POLL_SECONDS
                )
                if notice is not None:
                    self._announce(notice)
            except FencedError as error:
                self._note(error, "commits are not announced any more")
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                if not self._closing.is_set():
                    self._note(error, "commits are not announced for now")
                    self._closing.wait(_RETRY_SECONDS)

    def _announce(self, notice: CommitNotice) -> None:
        location = CheckpointLocation(
            notice.path, notice.manifest_digest, notice.attempt, notice.step
        )
        with self._announcing:
            if self._closing.is_set():
                return
            if self._connection is None:
                self._connection = Connection(self._synchronizer(), _ANNOUNCE_SECONDS)
            try:
                # No seconds: what explorers wait for begins with the commit.
                announcement = Announcement(
                    Published.saved(notice.step, notice.manifest_digest, notice.bytes, location),
                    again=True,  # an answer that was lost is no error
                )
                self._connection.call("announce", announcement, timeout=_ANNOUNCE_SECONDS)
            except _NEVER as error:
                self._note(error, f"step {notice.step} is not announced")
            else:
                self.announced += 1
        self._position = (notice.attempt, notice.step)

    def _note(self, error: Exception, what: str) -> None:
        error = getattr(error, "cause", None) or error  # without Ray's traceback of the actor
        self.failed += 1
        self.last_error = error
        logger.warning("%s: %s", what, error)
