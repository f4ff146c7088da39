"""Which writers of the attempt in force may write now: `PermitQueue` in the protocol's words."""

from collections.abc import Callable
from typing import Final

from trainsync.api.protocol import PermitAnswer, PermitRequest
from trainsync.monitor.ledger.permit_queue import TTL_SECONDS, PermitQueue
from trainsync.monitor.ledger.saves import SaveOwner

_HOLDERS_SHOWN: Final = 16


class Permits:
    """Never blocks; not for several threads.

    Args:
        monotonic: seconds that only ever go on: permits are judged by them.
        on_granted: told for how many seconds a writer waited for its permit.
        on_ended: called when a writer did not renew its permit in time.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        on_granted: Callable[[float], None],
        on_ended: Callable[[], None],
    ) -> None:
        self._monotonic = monotonic
        self._on_granted = on_granted
        self._on_ended = on_ended
        self._past_revisions = 0
        self._queue = self._made(quiet=False)

    @property
    def revision(self) -> int:
        """Grows whenever a permit changes, and is never less than it was."""
        return self._past_revisions + self._queue.revision

    @property
    def holders(self) -> int:
        """The number of holders that may write."""
        return self._queue.holders

    @property
    def waiters(self) -> int:
        """The number of holders that wait for a permit."""
        return self._queue.waiters

    def renew(self, *, quiet: bool) -> None:
        """Forget all of them.

        Args:
            quiet: grant none before those that this monitor does not know of have ended.
        """
        self._past_revisions += self._queue.revision + 1
        self._queue = self._made(quiet=quiet)

    def advance(self) -> None:
        """Permits whose holder is silent for too long end."""
        self._queue.advance(self._monotonic())

    def ask(self, owner: SaveOwner, request: PermitRequest) -> PermitAnswer:
        """Ask to write, ask again, or renew."""
        answer = self._queue.ask(
            _holder(owner, request.holder),
            request.scope,
            self._monotonic(),
            label=request.label,
            held=request.held,
        )
        return PermitAnswer(
            granted=answer.granted,
            ttl_seconds=self._queue.ttl,
            held_by=list(answer.held_by[:_HOLDERS_SHOWN]),
            ahead=answer.ahead,
        )

    def release(self, owner: SaveOwner, holder: str) -> None:
        """The write ended, or the permit is not wanted any more."""
        self._queue.release(_holder(owner, holder), self._monotonic())

    def _made(self, *, quiet: bool) -> PermitQueue:
        return PermitQueue(
            quiet_until=self._monotonic() + TTL_SECONDS if quiet else None,
            on_granted=self._on_granted,
            on_ended=self._on_ended,
        )


def _holder(owner: SaveOwner, holder: str) -> str:
    return f"{owner.incarnation}/{holder}"
