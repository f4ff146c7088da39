"""The account of a run, which hears of its pods, reports and saves. Pure.

What each class is, and where its number comes from:

- ``train``: the training loop, from one report to the next, except the time counted below. The
  process that calls ``ctx.report`` says when its loop began and how far its clock is.
- ``repeat``: the share of that time in steps that the run had reported before, in an attempt that
  was lost or rolled back. By counting steps.
- ``save``: the time that a checkpoint blocked its slowest rank, by the receipts of the ranks. They
  come later than the time that they speak of, so they are taken from the training that follows.
- ``sync``: one side waits for the other, or weights travel. Of trainers what ``pace.next_batches``
  took (receipts of state dicts where there is no pace); of explorers all but rollouts.
- ``generate``, ``stale``: rollouts that were trained on, and those that were not. The Synchronizer
  knows both; a rollout is told of once its fate is known.
- ``restart``: an attempt starts, the first too: from the last report of the one before (so with the
  step that was lost half-way) until its loop begins.
- ``queue``: pods that are made and wait for a node. Pods that a queue holds back are not made.
- ``idle``: time that no report covers: after the last step, and pods of which nothing reports.

All reports are cumulative, so one that is lost, late or doubled changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar, Final, Literal

from pydantic import ConfigDict

from trainsync.api.protocol import ProgressReport, SaveKind, WeightsReport
from trainsync.api.spec import Role
from trainsync.api.status import (
    AccountClass,
    AccountStatus,
    AccountUnit,
    Phase,
    RoleAccount,
    RolePods,
)
from trainsync.monitor.account.explorers import ExplorerBook
from trainsync.monitor.account.role_time import Pods, RoleLedger
from trainsync.monitor.account.trainers import TrainerBook
from trainsync.storage.records import RECORD_CONFIG

GOOD: Final = (AccountClass.TRAIN, AccountClass.GENERATE)
OF_ROLE: Final[Mapping[Role, tuple[AccountClass, ...]]] = {
    Role.TRAINER: (
        *(AccountClass.TRAIN, AccountClass.SAVE, AccountClass.SYNC, AccountClass.REPEAT),
        *(AccountClass.RESTART, AccountClass.QUEUE, AccountClass.IDLE),
    ),
    Role.EXPLORER: (
        *(AccountClass.GENERATE, AccountClass.SYNC, AccountClass.STALE),
        *(AccountClass.RESTART, AccountClass.QUEUE, AccountClass.IDLE),
    ),
}
"""The classes that a role's seconds can be in."""
_AT_REST: Final = (Phase.SUSPENDED, Phase.COMPLETE, Phase.FAILED)


@dataclass
class Account:
    """All that there is to keep; the docstring of this module says what a second counts as.

    Times are Unix seconds on a clock that never goes back.

    Attributes:
        since: when it began.
        time: the newest time that it was told.
        roles: of which pods were seen.
    """

    __pydantic_config__: ClassVar[ConfigDict] = RECORD_CONFIG

    run_uid: str
    unit: AccountUnit
    since: float
    time: float
    roles: dict[Role, RoleLedger] = field(default_factory=dict)
    trainers: TrainerBook = field(default_factory=TrainerBook)
    explorers: ExplorerBook = field(default_factory=ExplorerBook)
    version: Literal[1] = 1

    @classmethod
    def begin(cls, run_uid: str, unit: AccountUnit, now: float) -> "Account":
        """An account without a second."""
        return cls(run_uid, unit, now, now)

    def see_pods(self, pods: Mapping[Role, RolePods], phase: str | None, now: float) -> None:
        """The pods that there are at ``now``; of a run at rest nothing more is reported."""
        self.time = max(self.time, now)
        for role, found in pods.items():
            by_gpu = self.unit is AccountUnit.GPU
            held = float(found.held_gpus if by_gpu else found.held)
            waiting = float(found.waiting_gpus if by_gpu else found.waiting)
            ledger = self._ledger(role)
            if ledger.full:  # an attempt that starts for very long
                ledger.settle(self.time, {AccountClass.RESTART: 1.0})
            ledger.observe(self.time, held, waiting)
        if phase in _AT_REST:
            for ledger in self.roles.values():
                ledger.settle(self.time, {AccountClass.IDLE: 1.0})

    def told_resume(self, attempt: int, step: int) -> None:
        """The attempt was told to go on from ``step``; 0: from the beginning."""
        self.trainers.told_resume(attempt, step)

    def saved(self, kind: SaveKind, blocked_seconds: float) -> None:
        """A save has ended that blocked its slowest rank for so long."""
        self.trainers.saved(kind, blocked_seconds)

    def trained(self, attempt: int, report: ProgressReport, now: float, restarts: int = 0) -> None:
        """The training loop has reported, after so many restarts in place of its attempt."""
        self.time = max(self.time, now)
        ledger = self._ledger(Role.TRAINER)
        self.trainers.reported(ledger, attempt, report, self.time, restarts)
        if report.loop_seconds is None:  # with a pace the Synchronizer tells of rollouts
            self.explorers.unknown(self._ledger(Role.EXPLORER), attempt, ledger.until)

    def synchronized(self, attempt: int, report: WeightsReport, now: float) -> None:
        """The Synchronizer has reported."""
        self.time = max(self.time, now)
        if report.rollouts is not None:
            ledger = self._ledger(Role.EXPLORER)
            self.explorers.reported(ledger, attempt, report.rollouts, self.time)

    def shown(self) -> AccountStatus | None:
        """The account as the status shows it; None before a second is in a class."""
        roles = []
        for role, kinds in OF_ROLE.items():
            if (ledger := self.roles.get(role)) is None or ledger.total <= 0:
                continue
            seconds = {kind.value: round(ledger.seconds.get(kind, 0.0)) for kind in kinds}
            roles.append(
                RoleAccount(role=role.value, seconds=sum(seconds.values()), classes=seconds)
            )
        every = sum(role.seconds for role in roles)
        if not every:
            return None
        good = sum(role.classes.get(kind.value, 0) for role in roles for kind in GOOD)
        return AccountStatus(
            unit=self.unit,
            since=datetime.fromtimestamp(self.since, UTC),
            goodput=round(good / every, 4),
            roles=roles,
        )

    def _ledger(self, role: Role) -> RoleLedger:
        if role not in self.roles:
            self.roles[role] = RoleLedger([Pods(self.time, 0.0, 0.0)])
        return self.roles[role]
