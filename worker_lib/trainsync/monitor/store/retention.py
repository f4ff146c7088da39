"""Decides which steps of a store may go, and when: retention, and the readers of state dicts."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import CommittedInfo, SaveOwner
from trainsync.monitor.store import cleanup
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live.term import Tenure

_LOG = logging.getLogger(__name__)


class StoreRetention:
    """Removes steps when there are too many. Owned by `StoreExecutor`; one thread.

    Args:
        max_to_keep: saves of each kind; None keeps all.
        reading_seconds: a state dict stays so long after a newer one is committed: a reader that
            has no right to say so may be at it.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        tenure: Tenure,
        *,
        max_to_keep: int | None,
        reading_seconds: float,
        clock: Callable[[], datetime],
    ) -> None:
        self._bucket = bucket
        self._tenure = tenure
        self._max_to_keep = max_to_keep
        self._reading_time = timedelta(seconds=reading_seconds)
        self._clock = clock
        self._due = True
        self._readers_until: datetime | None = None  # then it is due again
        # When state dicts were found committed, and the first one of each owner.
        self._heard: dict[tuple[int, SaveOwner], datetime] = {}
        self._first_heard: dict[SaveOwner, datetime] = {}
        self._doomed: dict[int, set[str]] = {}  # see `references.remove`
        self.also_kept: Callable[[], set[int]] = set
        """Steps that are kept, beside those that the ledger and the term tell of."""

    def begin(self, ledger: Ledger) -> None:
        """Begin with what a rebuilt ledger knows.

        The newest state dict may have been committed just now, by the intent of the monitor before
        this one.
        """
        self._due, self._readers_until = True, None
        self._heard.clear()
        self._first_heard.clear()
        infos = ledger.infos(SaveKind.STATE_DICT)
        for info in infos:
            self._hear(info, info.time)
        if infos:
            newest = max(infos, key=lambda info: (info.age, info.step))
            self._heard[newest.step, newest.owner] = max(newest.time, self._clock())

    def committed(self, kind: SaveKind, info: CommittedInfo) -> None:
        """A save was committed now."""
        if kind is SaveKind.STATE_DICT:
            self._hear(info, self._clock())
        self._due = True

    def run(self, ledger: Ledger, now: datetime) -> None:
        """Remove steps, from ``ledger`` too, if there may be some to remove.

        Raises:
            StoreError: the store refuses; ask again.
            TermLostError: another monitor commits by now; nothing was removed.
        """
        readers_left = self._readers_until is not None and now >= self._readers_until
        if self._max_to_keep is None or not (self._due or readers_left):
            return
        began = self._tenure.term.origin
        protected = {save.key.step for save in ledger.saves() if save.open}
        protected |= self.also_kept()
        protected |= {found.step for kind in SaveKind if (found := ledger.newest(kind)) is not None}
        there = {(info.step, info.owner) for info in ledger.infos(SaveKind.STATE_DICT)}
        self._heard = {key: when for key, when in self._heard.items() if key in there}
        read = cleanup.readable(ledger, now, self._reading_time, self._heard)
        if began is not None and began.step is not None:
            if not _has_own(ledger, began.step):
                protected.add(began.step)
            # The attempt's explorers were told of it until the attempt's first one.
            own = [when for one, when in self._first_heard.items() if one in ledger.owners]
            if own and now < (until := min(own) + self._reading_time):
                read[began.step] = max(until, read.get(began.step, until))
        removed = cleanup.retain(
            self._bucket,
            self._tenure,
            ledger,
            self._max_to_keep,
            protected | set(read),
            self._doomed,
        )
        for step in removed:
            for kind in SaveKind:
                ledger.uncommitted(kind, step)
            _LOG.info("step %d removed: at most %s are kept", step, self._max_to_keep)
        self._due, self._readers_until = False, min(read.values(), default=None)

    def _hear(self, info: CommittedInfo, when: datetime) -> None:
        self._heard[info.step, info.owner] = when
        self._first_heard[info.owner] = min(when, self._first_heard.get(info.owner, when))


def _has_own(ledger: Ledger, step: int) -> bool:
    """Whether the attempt has saves of its own of each kind that ``step`` has: until then it may
    resume from that step once more, and its explorers have that step's weights."""
    kinds = [kind for kind in SaveKind if ledger.info(kind, step) is not None]
    return all(
        any(info.owner in ledger.owners for info in ledger.infos(kind))
        for kind in {SaveKind.CHECKPOINT, *kinds}
    )
