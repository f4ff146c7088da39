"""Tell the Synchronizer what the monitor decides about versions, for ``sync.method: checkpoint``.

Both relays run in the process that made the Synchronizer and knows the monitor: the actor makes no
calls.
"""

from collections.abc import Callable
from typing import Any, Final

from trainsync.api.protocol import CommitNotice, SaveKind, SaveState
from trainsync.monitor.client.base import CommitClient, MonitorClient
from trainsync.weights import threads
from trainsync.weights.errors import (
    InconsistentUploadError,
    StaleVersionError,
    SupersededTrainerError,
)
from trainsync.weights.relay import Relay
from trainsync.weights.synchronizer.connection import Connection
from trainsync.weights.versions import Announcement, CheckpointLocation, Published

_COMMIT_POLL_SECONDS: Final = 2.0  # the monitor answers as soon as there is a commit
_SAVE_POLL_SECONDS: Final = 2.0  # the monitor answers as soon as the save has ended
_VERSION_POLL_SECONDS: Final = 5.0  # the Synchronizer answers as soon as a version is in flight
_CALL_SECONDS: Final = 10.0
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
                self._connection = Connection(self._synchronizer(), _CALL_SECONDS)
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
        self._connection: Connection | None = None
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
                self._connection = Connection(self._synchronizer(), _CALL_SECONDS)
            self._connection.call("note_aborted", version, cause, timeout=_CALL_SECONDS)
        self.told += 1
