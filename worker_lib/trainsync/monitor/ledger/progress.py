"""Progress of training from reports: speed over a window and time of arrival. Pure."""

import math
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainsync.api.protocol import ProgressReport
from trainsync.api.status import Progress

WINDOW: Final = timedelta(minutes=10)
_MAX_SAMPLES: Final = 512
_FAR: Final = timedelta(days=3650)  # an estimate beyond this says nothing, and may not fit a date


@dataclass(frozen=True)
class StepCount:
    """Training steps reported since this monitor began: all, and those trained a second time."""

    trained: int = 0
    repeated: int = 0


class ProgressTracker:
    """Keeps a window of reports of the newest attempt."""

    def __init__(self) -> None:
        self._loop = (-1, 0)  # attempt, and restarts in place before
        self._samples: deque[tuple[datetime, int]] = deque(maxlen=_MAX_SAMPLES)
        self._last: ProgressReport | None = None
        self._newest_step = 0
        self.first: datetime | None = None
        """Time of the attempt's first report."""
        self.steps = StepCount()

    def report(
        self, attempt: int, report: ProgressReport, now: datetime, restarts: int = 0
    ) -> None:
        """Take a report. A new attempt, a restart in place or a step back begins a new window."""
        loop = (attempt, restarts)
        if loop < self._loop:
            return
        self._count(loop, report.step)
        begins = loop > self._loop
        if begins:
            self.first = now
        if begins or (self._samples and report.step < self._samples[-1][1]):
            self._samples.clear()
            self._loop = loop
        if self._samples and report.step == self._samples[-1][1]:
            self._last = report  # the same step again: newer metrics, no new sample
            return
        self._samples.append((now, report.step))
        while now - self._samples[0][0] > WINDOW and len(self._samples) > 2:
            self._samples.popleft()
        self._last = report

    def _count(self, loop: tuple[int, int], step: int) -> None:
        if loop == self._loop and self._last is not None:
            before = self._last.step
        else:
            # An attempt is first heard of after its first step, wherever it resumed.
            before = max(step - 1, 0)
        trained = max(step - before, 0)
        repeated = max(min(step, self._newest_step) - before, 0)
        self._newest_step = max(self._newest_step, step)
        self.steps = StepCount(self.steps.trained + trained, self.steps.repeated + repeated)

    @property
    def last(self) -> ProgressReport | None:
        """The last report as it came, not-a-numbers and all."""
        return self._last

    def current(self) -> Progress | None:
        """The progress that status shows: only finite metrics, since JSON has no others."""
        if self._last is None:
            return None
        now, step = self._samples[-1]
        return Progress(
            step=self._last.step,
            total_steps=self._last.total_steps,
            steps_per_minute=self._steps_per_minute(),
            eta=self._eta(now, step),
            last_report_time=now,
            metrics={k: v for k, v in self._last.metrics.items() if math.isfinite(v)},
            links=self._last.links,
        )

    def _steps_per_minute(self) -> float | None:
        (first_time, first_step), (last_time, last_step) = self._samples[0], self._samples[-1]
        seconds = (last_time - first_time).total_seconds()
        if seconds <= 0 or last_step <= first_step:
            return None
        return round((last_step - first_step) * 60 / seconds, 3)

    def _eta(self, now: datetime, step: int) -> datetime | None:
        rate = self._steps_per_minute()
        total = self._last.total_steps if self._last else None
        if not rate or total is None or total < step:
            return None
        minutes = (total - step) / rate
        if minutes * 60 > _FAR.total_seconds():
            return None
        return now + timedelta(minutes=minutes)
