"""What the core tells whoever keeps metrics."""

from typing import Protocol

from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger import AbortReason, CommittedInfo


class Observer(Protocol):
    """Called from the core's thread; must not block or raise."""

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """A save was committed, ``seconds`` after its registration."""
        ...

    def aborted(self, kind: SaveKind, reason: AbortReason) -> None:
        """A save was aborted."""
        ...

    def io_error(self, doing: str) -> None:
        """The volume refused something; it will be tried again."""
        ...


class NullObserver:
    """Keeps nothing."""

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""

    def aborted(self, kind: SaveKind, reason: AbortReason) -> None:
        """See `Observer`."""

    def io_error(self, doing: str) -> None:
        """See `Observer`."""
