"""Into which classes explorers' seconds go, by the Synchronizer's reports. Pure."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from trainsync.api.protocol import RolloutSeconds
from trainsync.api.status import AccountClass
from trainsync.monitor.account.role_time import RemoteClock, RoleLedger
from trainsync.storage.records import RECORD_CONFIG


@dataclass
class ExplorerBook:
    """Reported facts of rollouts.

    The reports count seconds of explorers; each pod of the role counts as their mean. A rollout's
    fate is known after its time has been settled: it is taken from what follows.

    Attributes:
        attempt: whose Synchronizer reported last; -1 before the first.
        clock: of that Synchronizer; ``name`` is what it calls that clock.
        present, told_used, told_unused: its counts, as reported last.
        used, unused: seconds of rollouts that are not in the account yet.
        unheard: newest attempt whose trainers have no pace, so that nothing tells of rollouts.
    """

    __pydantic_config__: ClassVar[ConfigDict] = RECORD_CONFIG

    attempt: int = -1
    name: str = ""
    clock: RemoteClock | None = None
    present: float = 0.0
    told_used: float = 0.0
    told_unused: float = 0.0
    used: float = 0.0
    unused: float = 0.0
    unheard: int = -1

    def reported(
        self, ledger: RoleLedger, attempt: int, report: RolloutSeconds, now: float
    ) -> None:
        """The Synchronizer of the attempt has counted so much."""
        if attempt < self.attempt:
            return
        if attempt > self.attempt:
            ledger.settle(now - report.loop, {AccountClass.RESTART: 1.0})
            self._begin(attempt, report, now)
        elif report.clock != self.name:  # of a Synchronizer that was made again
            ledger.settle(now - report.loop, {AccountClass.IDLE: 1.0})
            self._begin(attempt, report, now)
        clock = self.clock
        if clock is None or report.loop <= clock.seconds:
            return  # an older report, or the same again
        self.used += max(report.used - self.told_used, 0.0)
        self.unused += max(report.unused - self.told_unused, 0.0)
        present = max(report.present - self.present, 0.0)
        used = min(self.used, present)
        unused = min(self.unused, present - used)
        self.used -= used
        self.unused -= unused
        ledger.settle(
            clock.place(now, report.loop),
            {
                AccountClass.GENERATE: used,
                AccountClass.STALE: unused,
                AccountClass.SYNC: present - used - unused,
            },
        )
        self.present = report.present
        self.told_used, self.told_unused = report.used, report.unused

    def unknown(self, ledger: RoleLedger, attempt: int, now: float) -> None:
        """Trainers without a pace have trained until ``now``: nothing tells of rollouts."""
        if self.attempt >= attempt:
            return
        if self.unheard < attempt:
            ledger.settle(now, {AccountClass.RESTART: 1.0})
            self.unheard = attempt
        ledger.settle(now, {AccountClass.IDLE: 1.0})

    def _begin(self, attempt: int, report: RolloutSeconds, now: float) -> None:
        self.attempt, self.name = attempt, report.clock
        self.clock = RemoteClock.begin(now, report.loop)
        self.present = self.told_used = self.told_unused = 0.0
        self.used = self.unused = 0.0
