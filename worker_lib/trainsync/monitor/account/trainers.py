"""Into which classes trainers' seconds go, by the reports of the training loop. Pure."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from trainsync.api.protocol import ProgressReport, SaveKind
from trainsync.api.status import AccountClass
from trainsync.monitor.account.role_time import RemoteClock, RoleLedger
from trainsync.storage.records import RECORD_CONFIG


@dataclass
class TrainerBook:
    """Reported facts of the training loop.

    Attributes:
        attempt: that reported last; -1 before the first.
        step: its last step.
        newest: the newest step of all attempts: up to it a step is trained again.
        resumed: the newest attempt that asked what to resume from, and the answer.
        clock: of the reporting process; None of an older library.
        waited: seconds of the loop that went into ``sync``, as reported last; None: no pace.
        restarts: in place, of the attempt, before the loop that reported last.
        blocked_by_checkpoints, blocked_by_state_dicts: seconds that are not in the account yet.
    """

    __pydantic_config__: ClassVar[ConfigDict] = RECORD_CONFIG

    attempt: int = -1
    step: int = 0
    newest: int = 0
    resumed: tuple[int, int] | None = None
    clock: RemoteClock | None = None
    waited: float | None = None
    restarts: int = 0
    blocked_by_checkpoints: float = 0.0
    blocked_by_state_dicts: float = 0.0

    def told_resume(self, attempt: int, step: int) -> None:
        """Note the step that the attempt resumes from; 0: it starts anew."""
        self.resumed = (attempt, step)

    def saved(self, kind: SaveKind, seconds: float) -> None:
        """A save has ended that blocked its slowest rank for so long."""
        if kind is SaveKind.CHECKPOINT:
            self.blocked_by_checkpoints += seconds
        else:
            self.blocked_by_state_dicts += seconds

    def reported(
        self,
        ledger: RoleLedger,
        attempt: int,
        report: ProgressReport,
        now: float,
        restarts: int = 0,
    ) -> None:
        """The loop has completed ``report.step``. Reports of older loops are passed over."""
        if (attempt, restarts) < (self.attempt, self.restarts):
            return
        seconds = report.loop_seconds
        if (attempt, restarts) > (self.attempt, self.restarts):
            self._begin(ledger, attempt, report, now)
            self.restarts = restarts
        elif seconds is not None and self.clock is not None and seconds <= self.clock.seconds:
            if report.step <= self.step or seconds == self.clock.seconds:
                return  # an older report, or the same again
            # Another process of the attempt reports now.
            ledger.settle(now - seconds, {AccountClass.IDLE: 1.0})
            self.clock, self.waited = RemoteClock.begin(now, seconds), None
        self._settle(ledger, report, now)

    def _begin(self, ledger: RoleLedger, attempt: int, report: ProgressReport, now: float) -> None:
        seconds = report.loop_seconds
        ledger.settle(now - (seconds or 0.0), {AccountClass.RESTART: 1.0})
        before = max(report.step - 1, 0)
        if self.resumed is not None and self.resumed[0] == attempt:
            before = min(self.resumed[1], report.step)
        self.attempt, self.step = attempt, before
        self.clock = None if seconds is None else RemoteClock.begin(now, seconds)
        self.waited = None
        # What blocked the attempt before was lost with it.
        self.blocked_by_checkpoints = self.blocked_by_state_dicts = 0.0

    def _settle(self, ledger: RoleLedger, report: ProgressReport, now: float) -> None:
        time, length = now, now - ledger.until
        if report.loop_seconds is not None:
            if self.clock is None:
                self.clock = RemoteClock.begin(now, report.loop_seconds)
            length = report.loop_seconds - self.clock.seconds
            time = self.clock.place(now, report.loop_seconds)
        if report.waited_seconds is not None:
            waited = min(max(report.waited_seconds - (self.waited or 0.0), 0.0), length)
            self.waited = report.waited_seconds
            self.blocked_by_state_dicts = 0.0  # in what was waited
        else:
            waited = min(self.blocked_by_state_dicts, length)
            self.blocked_by_state_dicts -= max(waited, 0.0)
        work = max(length - waited, 0.0)
        saving = min(self.blocked_by_checkpoints, work)
        self.blocked_by_checkpoints -= saving
        again = self._share_repeated(report.step) * (work - saving)
        ledger.settle(
            time,
            {
                AccountClass.SYNC: waited,
                AccountClass.SAVE: saving,
                AccountClass.REPEAT: again,
                AccountClass.TRAIN: work - saving - again,
            },
        )
        self.step = report.step
        self.newest = max(self.newest, report.step)

    def _share_repeated(self, step: int) -> float:
        trained = step - self.step
        repeated = min(step, self.newest) - self.step
        return repeated / trained if trained > 0 and repeated > 0 else 0.0
