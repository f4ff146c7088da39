"""Records a run's account: gives it the time, and writes it."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from trainsync.api.protocol import ProgressReport, SaveKind, WeightsReport
from trainsync.api.spec import Role
from trainsync.api.status import AccountStatus, AccountUnit, RolePods
from trainsync.monitor.account.account import Account
from trainsync.monitor.account.places import AccountPlace
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.ledger.saves import AbortCause, CommittedInfo, SaveKey
from trainsync.storage import records
from trainsync.storage.errors import DamagedFileError, StorageError
from trainsync.storage.saves.receipts import Receipt

_LOG = logging.getLogger(__name__)

WRITE_SECONDS: Final = 10.0
"""Between two writes of the account to a volume."""
_RECORD = TypeAdapter(Account)
_LAST_TIME: Final = 4e9
_MOST_SECONDS: Final = 1e15


class AccountRecorder(NullObserver):
    """The account of a run whose pods are told; of one without pods (a local run) there is none.

    A monitor that dies loses no second: the next goes on from the file, which has the pods that
    were there, and the reports are cumulative. Only what is told once, right before it is killed
    (how long a save blocked), is lost. An account that is damaged begins anew. No error of the
    account reaches a save: where one is met, the log says so, and the account begins anew.

    Args:
        write_seconds: between two writes.
    """

    def __init__(
        self,
        place: AccountPlace,
        run_uid: str,
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        write_seconds: float = WRITE_SECONDS,
    ) -> None:
        self._place = place
        self._run_uid = run_uid
        self._clock = clock
        self._monotonic = monotonic
        self._write_seconds = write_seconds
        self._account: Account | None = None
        self._unread = False
        self._written: bytes | None = None
        self._began = 0.0  # on the account's clock, at ``_began_at`` on the monotonic one
        self._began_at = 0.0
        self._written_at = -math.inf
        self._blocked: defaultdict[int, float] = defaultdict(float)

    def load(self) -> None:
        """Go on from what was written: another monitor may have done so since.

        A place that refuses is asked again by `write`; until then nothing is counted.
        """
        self._account, self._written, self._unread = None, None, True
        try:
            self._read()
        except (OSError, StorageError) as error:
            _LOG.warning("the account is not read, which is tried again: %s", error)

    def _read(self) -> None:
        try:
            data = self._place.read()
            found = None if data is None else records.decode(_RECORD, data, Path(self._place.name))
        except DamagedFileError as error:
            _LOG.warning("the account begins anew: %s", error)
            found = None
        self._unread = False
        if found is not None and found.run_uid == self._run_uid:
            if _sound(found):
                self._account = found
            else:
                _LOG.warning("the account begins anew: its numbers cannot be")
        self._start_clock()

    def see_pods(self, pods: Mapping[Role, RolePods], phase: str | None, *, gpus: float) -> None:
        """The pods that there are now.

        Args:
            gpus: that the spec asks for; decides once, for the whole account, what is counted.
        """
        if self._unread:
            return
        if self._account is None:
            unit = AccountUnit.GPU if gpus > 0 else AccountUnit.POD
            self._account = Account.begin(self._run_uid, unit, self._clock().timestamp())
            self._start_clock()
        self._tell(lambda account: account.see_pods(pods, phase, self._now()))

    def told_resume(self, attempt: int, step: int) -> None:
        """The attempt was told to go on from ``step``; 0: from the beginning."""
        self._tell(lambda account: account.told_resume(attempt, step))
        self._written_at = -math.inf  # it is not told again

    def trained(self, attempt: int, report: ProgressReport, restarts: int = 0) -> None:
        """The training loop has reported; see `Account.trained`."""
        self._tell(lambda account: account.trained(attempt, report, self._now(), restarts))

    def synchronized(self, attempt: int, report: WeightsReport) -> None:
        """The Synchronizer has reported."""
        self._tell(lambda account: account.synchronized(attempt, report, self._now()))

    def written(self, receipt: Receipt) -> None:
        """See `Observer`."""
        self._blocked[receipt.rank] += receipt.blocked_seconds

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""
        self._ended(kind)

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        """See `Observer`."""
        self._ended(key.kind)

    def shown(self) -> AccountStatus | None:
        """The account as the status shows it; None where nothing is counted."""
        found: list[AccountStatus | None] = []
        self._tell(lambda account: found.append(account.shown()))
        return found[0] if found else None

    def write(self, *, now: bool = False) -> None:
        """Write the account, at most every so many seconds unless ``now``, and only what has
        changed. Raises what `AccountPlace.write` raises.
        """
        due = self._monotonic() - self._written_at >= self._write_seconds
        if not (due or now):
            return
        self._written_at = self._monotonic()  # a place that refuses is not asked more often
        if self._unread:
            self._read()
        if self._account is None:
            return
        timeless = records.encode(_RECORD, replace(self._account, time=0.0))
        if timeless == self._written:
            return
        self._place.write(records.encode(_RECORD, self._account))
        self._written = timeless

    def _tell(self, what: Callable[[Account], object]) -> None:
        if self._account is None:
            return
        try:
            what(self._account)
        except Exception:  # noqa: BLE001 - commits go on without an account
            _LOG.exception("the account begins anew, as its books failed")
            self._account = None

    def _ended(self, kind: SaveKind) -> None:
        blocked = max(self._blocked.values(), default=0.0)
        self._blocked.clear()
        self._tell(lambda account: account.saved(kind, blocked))

    def _start_clock(self) -> None:
        """Jumps of the wall clock count only while there is no monitor, and never backwards."""
        self._began, self._began_at = self._clock().timestamp(), self._monotonic()
        if self._account is not None:
            self._began = max(self._began, self._account.time)

    def _now(self) -> float:
        return self._began + self._monotonic() - self._began_at


def _sound(account: Account) -> bool:
    """Whether the numbers can be those of an account, as only this class writes them."""
    times = [account.since, account.time]
    seconds = []
    for ledger in account.roles.values():
        if not ledger.pods:
            return False
        times += [pods.time for pods in ledger.pods]
        seconds += [*ledger.seconds.values()]
        seconds += [weight for pods in ledger.pods for weight in (pods.held, pods.waiting)]
    return all(0 <= time <= _LAST_TIME for time in times) and all(
        0 <= one <= _MOST_SECONDS for one in seconds
    )
