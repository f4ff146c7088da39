"""Prometheus metrics of one monitor; names follow the Prometheus conventions.

Counters are counted as things happen; gauges are made from a view of the core at every scrape, and
what is not known has no series.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trainsync.api.protocol import ProgressReport, SaveKind
from trainsync.monitor.ledger import AbortReason, CommittedInfo
from trainsync.monitor.views import CoreView
from trainsync.storage.receipts import Receipt

_COMMIT_BUCKETS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_PART_BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Refused for who calls, not for what is asked.
_AUTH_CODES: Final = frozenset({"unauthenticated", "forbidden", "fenced", "claim_refused"})
MAX_SERIES: Final = 256
"""Most explorers, and most metrics of the trainer, that get a series of their own."""


class MonitorMetrics:
    """Also the core's `Observer`; prometheus_client is safe across threads."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._commits = Counter(
            "trainsync_checkpoint_commits", "Saves committed.", ["kind"], registry=registry
        )
        self._aborts = Counter(
            "trainsync_checkpoint_aborts", "Saves aborted.", ["kind", "cause"], registry=registry
        )
        self._commit_seconds = Histogram(
            "trainsync_checkpoint_commit_seconds",
            "From the registration of a save to its commit.",
            ["kind"],
            buckets=_COMMIT_BUCKETS,
            registry=registry,
        )
        self._blocked_seconds = _seconds(
            "blocked", "How long training stood still for a participant's part.", registry
        )
        self._queue_seconds = _seconds(
            "queue_wait", "How long a staged part waited before it was written.", registry
        )
        self._write_seconds = _seconds(
            "write", "From a part's first byte to its last fsync.", registry
        )
        self._staged_bytes = Counter(
            "trainsync_checkpoint_staged_bytes",
            "Bytes copied out of live state by saves that ended.",
            ["kind"],
            registry=registry,
        )
        self._written_bytes = Counter(
            "trainsync_checkpoint_written_bytes",
            "Bytes that participants of saves that ended wrote.",
            ["kind"],
            registry=registry,
        )
        self._permit_seconds = Histogram(
            "trainsync_checkpoint_permit_wait_seconds",
            "How long writers waited for a permit of the save strategy.",
            buckets=_COMMIT_BUCKETS,
            registry=registry,
        )
        self._permits_ended = Counter(
            "trainsync_checkpoint_permits_lost",
            "Permits whose holder did not renew them in time.",
            registry=registry,
        )
        self._io_errors = Counter(
            "trainsync_checkpoint_io_errors",
            "What the volume refused and was tried again.",
            ["doing"],
            registry=registry,
        )
        self._auth_refused = Counter(
            "trainsync_auth_refused", "Callers refused.", ["reason"], registry=registry
        )
        self._requests_refused = Counter(
            "trainsync_requests_refused", "Requests refused.", ["reason"], registry=registry
        )
        self._status_writes = Counter(
            "trainsync_status_writes", "Writes of the run's status.", ["outcome"], registry=registry
        )
        for kind in SaveKind:  # so that a rate is 0, not absent, before the first
            self._commits.labels(kind.value)
            self._staged_bytes.labels(kind.value)
            self._written_bytes.labels(kind.value)
            for reason in AbortReason:
                self._aborts.labels(kind.value, reason.value)
        self._view = _ViewCollector()
        registry.register(self._view)

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""
        del info  # its step, time and bytes come with the view
        self._commits.labels(kind.value).inc()
        self._commit_seconds.labels(kind.value).observe(seconds)

    def aborted(self, kind: SaveKind, reason: AbortReason) -> None:
        """See `Observer`."""
        self._aborts.labels(kind.value, reason.value).inc()

    def written(self, receipt: Receipt) -> None:
        """See `Observer`."""
        kind = receipt.kind.value
        self._blocked_seconds.labels(kind).observe(receipt.blocked_seconds)
        self._queue_seconds.labels(kind).observe(receipt.queue_seconds)
        self._write_seconds.labels(kind).observe(receipt.seconds)
        self._staged_bytes.labels(kind).inc(receipt.staged_bytes)
        self._written_bytes.labels(kind).inc(sum(entry.bytes for entry in receipt.files))

    def permit_granted(self, seconds: float) -> None:
        """See `Observer`."""
        self._permit_seconds.observe(seconds)

    def permit_ended(self) -> None:
        """See `Observer`."""
        self._permits_ended.inc()

    def io_error(self, doing: str) -> None:
        """See `Observer`."""
        self._io_errors.labels(doing).inc()

    def refused(self, code: str) -> None:
        """A request was refused, with this code of a `MonitorError`."""
        if code in _AUTH_CODES:
            self._auth_refused.labels(code).inc()
        else:
            self._requests_refused.labels(code).inc()

    def status_written(self, outcome: str) -> None:
        """``written``, ``error`` or ``conflict``."""
        self._status_writes.labels(outcome).inc()

    def render(self, view: CoreView, report: ProgressReport | None, *, lease_held: bool) -> bytes:
        """The exposition text for one scrape."""
        self._view.show(view, report, lease_held=lease_held)
        return generate_latest(self.registry)


def _seconds(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(
        f"trainsync_checkpoint_{name}_seconds",
        text,
        ["kind"],
        buckets=_PART_BUCKETS,
        registry=registry,
    )


class _ViewCollector(Collector):
    def __init__(self) -> None:
        self._shown: tuple[CoreView, ProgressReport | None, bool] | None = None

    def show(self, view: CoreView, report: ProgressReport | None, *, lease_held: bool) -> None:
        self._shown = (view, report, lease_held)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        if self._shown is None:
            return
        view, report, lease_held = self._shown
        yield _gauge("trainsync_monitor_lease_held", "Whether this monitor may commit.", lease_held)
        if view.attempt is not None:
            yield _gauge("trainsync_run_attempt", "Attempt in force.", view.attempt)
        yield from _saves(view)
        yield from _progress(view, report)
        yield from _weights(view)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _saves(view: CoreView) -> Iterator[GaugeMetricFamily]:
    checkpoint = view.checkpoint
    prefix = "trainsync_checkpoint_last_committed"
    step = GaugeMetricFamily(f"{prefix}_step", "Newest committed step.", labels=["kind"])
    time = GaugeMetricFamily(
        f"{prefix}_timestamp_seconds", "When the newest step was committed.", labels=["kind"]
    )
    size = GaugeMetricFamily(f"{prefix}_bytes", "Size of the newest step.", labels=["kind"])
    for kind, saved in (
        (SaveKind.CHECKPOINT, checkpoint.last_committed),
        (SaveKind.STATE_DICT, checkpoint.last_state_dict),
    ):
        if saved is not None:
            step.add_metric([kind.value], saved.step)
            time.add_metric([kind.value], saved.time.timestamp())
            size.add_metric([kind.value], saved.bytes)
    yield from (step, time, size)
    yield _gauge("trainsync_checkpoint_in_flight", "Saves registered and open.", view.in_flight)
    retained = GaugeMetricFamily(
        "trainsync_checkpoint_retained", "Committed saves on the volume.", labels=["kind"]
    )
    for kind, count in view.retained.items():
        retained.add_metric([kind.value], count)
    yield retained
    leases = view.leases
    yield _gauge("trainsync_checkpoint_reader_leases", "Readers that hold a step.", leases.readers)
    yield _gauge("trainsync_checkpoint_permits_held", "Writers with a permit.", leases.writers)
    yield _gauge(
        "trainsync_checkpoint_permits_waiting", "Writers that wait for one.", leases.waiting
    )


def _progress(view: CoreView, report: ProgressReport | None) -> Iterator[GaugeMetricFamily]:
    progress = view.progress
    if progress is None or report is None:
        return
    yield _gauge("trainsync_run_step", "Last step reported.", progress.step)
    if progress.total_steps is not None:
        yield _gauge("trainsync_run_total_steps", "Steps to go to.", progress.total_steps)
    if progress.steps_per_minute is not None:
        yield _gauge(
            "trainsync_run_steps_per_minute", "Speed over ten minutes.", progress.steps_per_minute
        )
    yield _gauge(
        "trainsync_run_last_report_timestamp_seconds",
        "When the trainer last reported.",
        progress.last_report_time.timestamp(),
    )
    metric = GaugeMetricFamily("trainsync_run_metric", "A metric of the trainer.", labels=["name"])
    for name, value in sorted(report.metrics.items())[:MAX_SERIES]:
        metric.add_metric([name], value)
    yield metric


def _weights(view: CoreView) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    weights = view.weights
    if weights is None:
        return
    yield _gauge(
        "trainsync_weights_version", "Version of the trainer's weights.", weights.trainer_version
    )
    if weights.last_duration_seconds is not None:
        yield _gauge(
            "trainsync_weights_last_duration_seconds",
            "How long the last synchronisation took.",
            weights.last_duration_seconds,
        )
    if weights.last_bytes is not None:
        yield _gauge("trainsync_weights_last_bytes", "Bytes of the last one.", weights.last_bytes)
    lag = GaugeMetricFamily(
        "trainsync_weights_lag", "Training steps an explorer is behind.", labels=["explorer"]
    )
    # A lost explorer's lag would grow for ever, and hide that of those that live.
    living = [explorer for explorer in weights.explorers if explorer.state != "lost"]
    for explorer in living[:MAX_SERIES]:
        lag.add_metric([explorer.id], explorer.lag)
    yield lag
    yield CounterMetricFamily(
        "trainsync_weights_syncs",
        "Synchronisations of this attempt after which every explorer had the version.",
        value=view.syncs,
    )
    losses = CounterMetricFamily(
        "trainsync_weights_losses",
        "How often explorers of this attempt missed a version.",
        labels=["cause"],
    )
    for cause, count in view.losses.items():
        losses.add_metric([cause], count)
    yield losses
