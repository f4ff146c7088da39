"""Progress reports: checked where the trainer makes them, and sent in the background."""

import logging
import math
import operator
import threading
from collections.abc import Mapping
from numbers import Real

from pydantic import ValidationError

from trainsync.api.protocol import ProgressReport
from trainsync.checkpoint.save.registration import AWAY
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.client.sender import LatestWinsSender, SenderStats
from trainsync.monitor.errors import FencedError

logger = logging.getLogger(__name__)

MAX_METRICS = 64


def progress_report(
    step: int,
    total: int | None,
    metrics: Mapping[str, float] | None,
    links: Mapping[str, str] | None = None,
    pace_seconds: tuple[float, float] | None = None,
) -> ProgressReport:
    """The report for the monitor.

    A metric that is NaN or infinite is news, and is sent; `not_finite` names it.

    Args:
        pace_seconds: of the loop, and of these in waiting; see `TrainerPace.seconds`.

    Raises:
        ValueError: what is wrong with it, in a sentence.
    """
    for name, number in (("step", step), ("total", total)):
        if number is not None and not (_is_whole(number) and number >= 0):
            raise ValueError(f"report: {name} is {number!r}, expected an integer of at least 0")
    if total is not None and step > total:
        raise ValueError(f"report: step {step} is after the last one, total is {total}")
    metrics = dict(metrics or {})
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"report: {len(metrics)} metrics, expected at most {MAX_METRICS}")
    for metric, value in metrics.items():
        if not isinstance(metric, str):
            raise ValueError(f"report: a metric is named {metric!r}, expected a str")
        if not isinstance(value, Real):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise ValueError(
                f"report: metrics[{metric!r}] is a {kind}, expected a number; of a tensor, .item()"
            )
    numbers = {metric: float(value) for metric, value in metrics.items()}
    last = None if total is None else operator.index(total)
    try:
        return ProgressReport(
            step=operator.index(step),
            total_steps=last,
            metrics=numbers,
            links=dict(links) if links else None,
            loop_seconds=None if pace_seconds is None else round(pace_seconds[0], 3),
            waited_seconds=None if pace_seconds is None else round(pace_seconds[1], 3),
        )
    except ValidationError as error:  # all else was checked above
        raise ValueError(
            f"report: links are {links!r}, expected at most 8 names of at most 32 characters with "
            "http:// or https:// URLs of at most 512"
        ) from error


def not_finite(report: ProgressReport) -> dict[str, str]:
    """A sentence for each metric that is NaN or infinite."""
    return {
        metric: f"report: metrics[{metric!r}] is {value} at step {report.step}"
        for metric, value in report.metrics.items()
        if not math.isfinite(value)
    }


def _is_whole(number: object) -> bool:
    return hasattr(number, "__index__") and not isinstance(number, bool)


class ProgressReports:
    """Sends the newest report; see `RunContext.report`."""

    def __init__(self) -> None:
        self._sender: LatestWinsSender[ProgressReport] | None = None
        self._lock = threading.Lock()  # guards the sender
        self._not_finite: frozenset[str] = frozenset()  # metrics of the last report
        self.links: dict[str, str] = {}
        """All links that were reported, which each report repeats."""

    @property
    def stats(self) -> SenderStats:
        """Counts how the reports fared."""
        return SenderStats() if self._sender is None else self._sender.stats

    def send(self, progress: ProgressReport, monitor: MonitorClient) -> None:
        """Send a report when the one before is sent; returns at once.

        Raises:
            FencedError: an earlier report was refused because a newer attempt runs.
        """
        found = not_finite(progress)
        for metric, sentence in found.items():
            if metric not in self._not_finite:  # once: it may stay so for thousands of steps
                logger.warning("%s", sentence)
        self._not_finite = frozenset(found)
        with self._lock:
            if self._sender is None:
                self._sender = LatestWinsSender("trainsync-progress", monitor.report_progress, AWAY)
            sender = self._sender
        if isinstance(error := sender.stats.last_error, FencedError):
            raise error
        sender.submit(progress)

    def restart(self, timeout: float) -> None:
        """Send what is unsent, then report by another client of the monitor."""
        with self._lock:
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close(timeout)

    def close(self, timeout: float) -> bool:
        """Send the last report. False if ``timeout`` seconds were not enough."""
        return self._sender is None or self._sender.close(timeout)
