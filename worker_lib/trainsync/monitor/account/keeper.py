"""Keeps a run's account: its clock, and its file on the volume."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from pydantic import TypeAdapter

from trainsync.api.protocol import ProgressReport, SaveKind, WeightsReport
from trainsync.api.spec import Role
from trainsync.api.status import AccountStatus, AccountUnit, RolePods
from trainsync.monitor.account.account import Account
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.ledger.saves import AbortCause, CommittedInfo, SaveKey
from trainsync.storage import atomic, records
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import Receipt

_LOG = logging.getLogger(__name__)

WRITE_SECONDS: Final = 10.0
"""Between two writes of the account to the volume."""
_RECORD = TypeAdapter(Account)


class AccountKeeper(NullObserver):
    """The account of a run whose pods are told; of one without pods (a local run) there is none.

    A monitor that dies loses no second: the next goes on from the file, which has the pods that
    were there, and the reports are cumulative. Only what is told once, right before it is killed
    (how long a save blocked), is lost. An account that cannot be read begins anew.

    Args:
        gate: asked right before the file is replaced; see `Authority`.
    """

    def __init__(
        self,
        run: RunDirectory,
        run_uid: str,
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        gate: Callable[[], None],
    ) -> None:
        self._run = run
        self._run_uid = run_uid
        self._clock = clock
        self._monotonic = monotonic
        self._gate = gate
        self._account: Account | None = None
        self._began = 0.0  # on the account's clock, at ``_began_at`` on the monotonic one
        self._began_at = 0.0
        self._written_at = -math.inf
        self._blocked: defaultdict[int, float] = defaultdict(float)

    def load(self) -> None:
        """Go on from the volume: another monitor may have written since. Raises `OSError`."""
        self._account = None
        try:
            found = records.read(_RECORD, self._run.account)
        except FileNotFoundError:
            found = None
        except DamagedFileError as error:
            _LOG.warning("the account begins anew: %s", error)
            found = None
        if found is not None and found.run_uid == self._run_uid and _sound(found):
            self._account = found
        self._start_clock()

    def see_pods(self, pods: Mapping[Role, RolePods], phase: str | None, *, gpus: float) -> None:
        """The pods that there are now.

        Args:
            gpus: that the spec asks for; decides once, for the whole account, what is counted.
        """
        if self._account is None:
            unit = AccountUnit.GPU if gpus > 0 else AccountUnit.POD
            self._account = Account.begin(self._run_uid, unit, self._clock().timestamp())
            self._start_clock()
        self._account.see_pods(pods, phase, self._now())

    def told_resume(self, attempt: int, step: int) -> None:
        """The attempt was told to go on from ``step``; 0: from the beginning."""
        if self._account is not None:
            self._account.told_resume(attempt, step)
            self._written_at = -math.inf  # it is not told again

    def trained(self, attempt: int, report: ProgressReport) -> None:
        """The training loop has reported."""
        if self._account is not None:
            self._account.trained(attempt, report, self._now())

    def synchronized(self, attempt: int, report: WeightsReport) -> None:
        """The Synchronizer has reported."""
        if self._account is not None:
            self._account.synchronized(attempt, report, self._now())

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
        """What status shows; None where nothing is counted."""
        return None if self._account is None else self._account.shown()

    def write(self, *, now: bool = False) -> None:
        """Write the account to the volume, at most every `WRITE_SECONDS` unless ``now``.

        Raises `OSError`, and what the gate raises.
        """
        due = self._monotonic() - self._written_at >= WRITE_SECONDS
        if self._account is None or not (due or now):
            return
        self._written_at = self._monotonic()  # a volume that refuses is not asked more often
        atomic.make_directory(self._run.account.parent)
        atomic.write_bytes(
            self._run.account, records.encode(_RECORD, self._account), self._gate, durably=False
        )

    def _ended(self, kind: SaveKind) -> None:
        blocked = max(self._blocked.values(), default=0.0)
        self._blocked.clear()
        if self._account is not None:
            self._account.saved(kind, blocked)

    def _start_clock(self) -> None:
        """Jumps of the wall clock count only while there is no monitor, and never backwards."""
        self._began, self._began_at = self._clock().timestamp(), self._monotonic()
        if self._account is not None:
            self._began = max(self._began, self._account.time)

    def _now(self) -> float:
        return self._began + self._monotonic() - self._began_at


def _sound(account: Account) -> bool:
    """Whether each role has its pods, as only this class writes them."""
    return all(ledger.pods for ledger in account.roles.values())
