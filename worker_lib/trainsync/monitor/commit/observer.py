"""The core's calls to metrics, Events, the journal and requests that wait for a commit."""

from typing import Protocol

from trainsync.api.protocol import LoadReport, SaveKind, WeightsReport
from trainsync.monitor.ledger.saves import AbortCause, CommittedInfo, SaveKey
from trainsync.storage.saves.receipts import Receipt


class Observer(Protocol):
    """Called from the core's thread; must not block or raise."""

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """A save was committed, ``seconds`` after its registration."""
        ...

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        """A save was aborted."""
        ...

    def damaged(self, kind: SaveKind, message: str) -> None:
        """Committed saves of ``kind`` do not stand, or its pointer did not; told once."""
        ...

    def restarted(self, attempt: int, number: int, reason: str) -> None:
        """The attempt was restarted in place, the ``number``-th time."""
        ...

    def resumed(self, attempt: int, step: int) -> None:
        """The attempt was told to resume from the checkpoint of ``step``; may be told again."""
        ...

    def loaded(self, attempt: int, report: LoadReport) -> None:
        """All ranks of the attempt have loaded; may be told again."""
        ...

    def resume_failed(self, attempt: int, message: str) -> None:
        """There was a checkpoint, and nothing valid is left; told whenever the attempt asks."""
        ...

    def late_part(self, kind: SaveKind) -> None:
        """A part came after the commit of a save that it was not registered for."""
        ...

    def written(self, receipt: Receipt) -> None:
        """A participant's part of a save that has just ended; each is told once.

        All parts of a save are told right before its `committed` or `aborted`.
        """
        ...

    def set_aside(self, step: int) -> None:
        """A checkpoint whose bytes have changed counts no more."""
        ...

    def io_error(self, doing: str) -> None:
        """The volume refused something; it will be tried again."""
        ...

    def weights_reported(self, report: WeightsReport) -> None:
        """The Synchronizer of the attempt in force reported."""
        ...

    def permit_granted(self, seconds: float) -> None:
        """A writer waited so long for its permit."""
        ...

    def permit_ended(self) -> None:
        """A writer did not renew its permit in time."""
        ...


class Observers:
    """Several observers, told in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.committed(kind, info, seconds)

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.aborted(key, cause)

    def damaged(self, kind: SaveKind, message: str) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.damaged(kind, message)

    def restarted(self, attempt: int, number: int, reason: str) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.restarted(attempt, number, reason)

    def resumed(self, attempt: int, step: int) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.resumed(attempt, step)

    def loaded(self, attempt: int, report: LoadReport) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.loaded(attempt, report)

    def resume_failed(self, attempt: int, message: str) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.resume_failed(attempt, message)

    def late_part(self, kind: SaveKind) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.late_part(kind)

    def written(self, receipt: Receipt) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.written(receipt)

    def set_aside(self, step: int) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.set_aside(step)

    def io_error(self, doing: str) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.io_error(doing)

    def weights_reported(self, report: WeightsReport) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.weights_reported(report)

    def permit_granted(self, seconds: float) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.permit_granted(seconds)

    def permit_ended(self) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.permit_ended()


class NullObserver:
    """An observer that keeps nothing."""

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        """See `Observer`."""

    def damaged(self, kind: SaveKind, message: str) -> None:
        """See `Observer`."""

    def restarted(self, attempt: int, number: int, reason: str) -> None:
        """See `Observer`."""

    def resumed(self, attempt: int, step: int) -> None:
        """See `Observer`."""

    def loaded(self, attempt: int, report: LoadReport) -> None:
        """See `Observer`."""

    def resume_failed(self, attempt: int, message: str) -> None:
        """See `Observer`."""

    def late_part(self, kind: SaveKind) -> None:
        """See `Observer`."""

    def written(self, receipt: Receipt) -> None:
        """See `Observer`."""

    def set_aside(self, step: int) -> None:
        """See `Observer`."""

    def io_error(self, doing: str) -> None:
        """See `Observer`."""

    def weights_reported(self, report: WeightsReport) -> None:
        """See `Observer`."""

    def permit_granted(self, seconds: float) -> None:
        """See `Observer`."""

    def permit_ended(self) -> None:
        """See `Observer`."""
