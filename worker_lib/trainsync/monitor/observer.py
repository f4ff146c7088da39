"""What the core tells whoever keeps metrics."""

from typing import Protocol

from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger import AbortReason, CommittedInfo
from trainsync.storage.receipts import Receipt


class Observer(Protocol):
    """Called from the core's thread; must not block or raise."""

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """A save was committed, ``seconds`` after its registration."""
        ...

    def aborted(self, kind: SaveKind, reason: AbortReason) -> None:
        """A save was aborted."""
        ...

    def written(self, receipt: Receipt) -> None:
        """A participant's part of a save that has just ended; each is told once."""
        ...

    def io_error(self, doing: str) -> None:
        """The volume refused something; it will be tried again."""
        ...

    def permit_granted(self, seconds: float) -> None:
        """A writer waited so long for its permit."""
        ...

    def permit_ended(self) -> None:
        """A writer did not renew its permit in time."""
        ...


class NullObserver:
    """Keeps nothing."""

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""

    def aborted(self, kind: SaveKind, reason: AbortReason) -> None:
        """See `Observer`."""

    def written(self, receipt: Receipt) -> None:
        """See `Observer`."""

    def io_error(self, doing: str) -> None:
        """See `Observer`."""

    def permit_granted(self, seconds: float) -> None:
        """See `Observer`."""

    def permit_ended(self) -> None:
        """See `Observer`."""
