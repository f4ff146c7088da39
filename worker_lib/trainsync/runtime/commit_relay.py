"""Announce every committed state dict to the Synchronizer, as soon as the monitor tells of it.

Runs in the process that made the Synchronizer and knows the monitor: the actor makes no calls.
"""

from collections.abc import Callable
from typing import Any, Final

from trainsync.api.protocol import CommitNotice, SaveKind
from trainsync.monitor.client.base import CommitClient
from trainsync.weights.errors import (
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
)
from trainsync.weights.relay import Relay
from trainsync.weights.synchronizer.connection import Connection
from trainsync.weights.versions import CHECKPOINT, CheckpointLocation

_POLL_SECONDS: Final = 2.0  # of one question, which is answered as soon as there is a commit
_ANNOUNCE_SECONDS: Final = 10.0
_NEVER: Final = (StaleVersionError, SupersededTrainerError, InconsistentUploadError)


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
        self._connection: Connection | None = None
        self._position = (-1, -1)
        self.announced = 0
        super().__init__("trainsync-commits", "commits are not announced")

    def _pass_on(self) -> None:
        notice = self._monitor.newer_commit(SaveKind.STATE_DICT, self._position, _POLL_SECONDS)
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
                self._connection = Connection(self._synchronizer(), _ANNOUNCE_SECONDS)
            try:
                self._connection.call(
                    "announce",
                    notice.step,
                    notice.manifest_digest,
                    notice.bytes,
                    0.0,  # what explorers wait for begins with the commit
                    CHECKPOINT,
                    location,
                    None,
                    None,
                    True,  # an answer that was lost is no error
                    timeout=_ANNOUNCE_SECONDS,
                )
            except _NEVER as error:
                self._note(error, f"step {notice.step} is not announced")
            else:
                self.announced += 1
        self._position = (notice.attempt, notice.step)
