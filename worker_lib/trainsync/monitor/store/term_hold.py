"""`TermHold`: whether this monitor holds the term of a run in a store, and may act on it."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.storage.errors import ClaimTakenError, StorageError
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live.term import (
    AttemptOverError,
    Tenure,
    Term,
    TermLostError,
    check_run,
)
from trainsync.storage.objects.probe import require_conditional_puts

_LOG = logging.getLogger(__name__)
_CHECK_SECONDS: Final = 10.0
_AGAIN_SECONDS: Final = 5.0
"""A store that refuses the term is asked again so late; callers hear of it at once meanwhile."""
_RETAKE_SECONDS: Final = 20.0
"""A monitor that lost the term and holds its Lease so long takes it anew: longer than a Lease lasts
without its renewal, so the one that took the term has no right to it."""
_LONGEST_RETAKE_SECONDS: Final = 300.0
_RETAKES: Final = 8


class TermHold:
    """Takes the term, keeps watch over it, and knows when it is lost. Owned by the core's thread.

    Args:
        tenure: the term itself.
        authority: whether this monitor may take the term, which `seize` then does; None in a local
            run, whose claim calls `take`.
        monotonic: seconds that only ever go on.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        tenure: Tenure,
        run_uid: str,
        *,
        authority: Authority | None,
        monotonic: Callable[[], float],
    ) -> None:
        self._bucket = bucket
        self._tenure = tenure
        self._run_uid = run_uid
        self._authority = authority
        self._monotonic = monotonic
        self._won: int | None = None  # the authority's term for which the run's was asked last
        self._refused: tuple[float, str] = (-math.inf, "")  # until when, and why
        self._holds = False
        self._lost: str | None = None
        self._lost_at = 0.0
        self._retakes = 0
        self._checked = monotonic()

    @property
    def holds(self) -> bool:
        """Whether the term was taken and the ledger stands; also of a term that was lost since."""
        return self._holds

    @property
    def holds_still(self) -> bool:
        """As `holds`, and the term is not known to be lost."""
        return self._holds and self._lost is None

    @property
    def lost(self) -> str | None:
        """A sentence that says who has the term now; None while this monitor has not lost it."""
        return self._lost

    @property
    def ready(self) -> bool:
        """Whether requests can be answered."""
        if not self.holds_still:
            return False
        return self._authority is None or (self.may() and self._won == self._authority.term())

    def may(self) -> bool:
        """Whether the authority is held."""
        try:
            if self._authority is not None:
                self._authority.gate()
        except errors.MonitorError:
            return False
        return True

    def see_right(self) -> None:
        """See that this monitor may do what it judged; raises `MonitorError`, `StoreError`."""
        if self._authority is not None:
            self._authority.gate()
        self._tenure.check()

    def check_now_and_then(self) -> None:
        """See every 10 s that the term is still this monitor's; raises as `Tenure.check`."""
        if self._monotonic() - self._checked >= _CHECK_SECONDS:
            self._tenure.check()
            self._checked = self._monotonic()

    def seize(self, learn: Callable[[], None]) -> bool:
        """Take the term, if the authority was won since; in a local run the claim does.

        Args:
            learn: reads from the store what the monitor before this one left.

        Returns:
            Whether it was taken now.

        Raises:
            NotReadyError: the authority is not held.
            StorageUnavailableError: the store refuses.
        """
        if self._authority is None:
            return False
        self._authority.gate()
        term = self._authority.term()
        if term != self._won:
            self._won, self._lost, self._holds, self._retakes = term, None, False, 0
            self._refused = (-math.inf, "")
        if self._lost is not None and self._may_retake():
            _LOG.warning("the run's term is taken anew: this monitor's Lease is held all along")
            self._lost, self._holds = None, False
            self._retakes += 1
        if self._holds or self._lost is not None:
            return False
        until, why = self._refused
        if self._monotonic() < until:
            raise errors.StorageUnavailableError(why)
        try:
            with self.kept(), self.learning():
                self.take(partial(self._see_take, self._authority), learn)
        except errors.StorageUnavailableError as error:
            self._refused = (self._monotonic() + _AGAIN_SECONDS, str(error))
            raise
        return True

    def take(self, check: Callable[[Term | None], None], learn: Callable[[], None]) -> None:
        """Take the term, then learn what the store has. Raises `StoreError`, and what both raise.

        Args:
            check, learn: see `Tenure.take`, and `seize`.
        """
        require_conditional_puts(self._bucket, anew=True)
        self._tenure.take(check)
        learn()
        self._checked = self._monotonic()

    @contextmanager
    def learning(self) -> Iterator[None]:
        """The ledger does not stand before the body has ended without an error."""
        self._holds = False
        yield
        self._holds = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Raise refusals of the store or the term as `MonitorError`; a lost term is remembered."""
        try:
            yield
        except TermLostError as error:
            self._lost, self._lost_at = str(error), self._monotonic()
            _LOG.error("%s", error)
            raise errors.FencedError(str(error)) from error
        except (AttemptOverError, ClaimTakenError) as error:
            raise errors.ClaimRefusedError(str(error)) from error
        except StorageError as error:
            raise errors.StorageUnavailableError(str(error)) from error

    def _may_retake(self) -> bool:
        """Whether a late put of an old monitor may have taken the term from this one."""
        wait = min(_RETAKE_SECONDS * 2**self._retakes, _LONGEST_RETAKE_SECONDS)
        return self._retakes < _RETAKES and self._monotonic() - self._lost_at >= wait

    def _see_take(self, authority: Authority, there: Term | None) -> None:
        """See that the term may be replaced: reading it may have taken longer than the Lease."""
        authority.gate()
        check_run(self._bucket, there, self._run_uid)
