"""Tell the Synchronizer of a version whose save was aborted, so that no explorer waits for it.

Runs in the process that made the Synchronizer, as `trainsync.runtime.commit_relay` does.
"""

from collections.abc import Callable
from typing import Any, Final

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.monitor.client.base import MonitorClient
from trainsync.weights import threads
from trainsync.weights.relay import Relay
from trainsync.weights.synchronizer.connection import Connection

_POLL_SECONDS: Final = 5.0  # the Synchronizer answers as soon as a version is in flight
_SAVE_POLL_SECONDS: Final = 2.0  # the monitor answers as soon as the save has ended
_NOTE_SECONDS: Final = 10.0


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
            question = actor.next_in_flight.remote(self._committed, _POLL_SECONDS)
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
                self._connection = Connection(self._synchronizer(), _NOTE_SECONDS)
            self._connection.call("note_aborted", version, cause, timeout=_NOTE_SECONDS)
        self.told += 1
