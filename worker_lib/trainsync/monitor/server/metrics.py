"""Prometheus metrics of one monitor, as `trainsync.monitor.server.metrics_catalogue` declares them.

Counters are counted as things happen; gauges are made from a view of the core at every scrape, and
what is not known has no series.
"""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from trainsync.api.metrics import Metric
from trainsync.api.protocol import LoadReport, ProgressReport, SaveKind, WeightsReport
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core.views import CoreView
from trainsync.monitor.errors import BY_CODE
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, CommittedInfo, SaveKey
from trainsync.monitor.server import metrics_catalogue as declared
from trainsync.monitor.server.metrics_view import ViewCollector
from trainsync.storage.saves.receipts import Receipt


class MonitorMetrics(NullObserver):
    """Also the core's `Observer`; prometheus_client is safe across threads.

    Args:
        namespace, run: labels of every series, so that it names its run however it is scraped.
    """

    def __init__(self, namespace: str, run: str) -> None:
        self._labels = {"namespace": namespace, "run": run}
        self._registry = registry = CollectorRegistry()
        self._commits = _counter(declared.COMMITS, registry)
        self._aborts = _counter(declared.ABORTS, registry)
        self._set_aside = _counter(declared.SET_ASIDE, registry)
        self._late_parts = _counter(declared.LATE_PARTS, registry)
        self._loaded_bytes = _counter(declared.LOADED_BYTES, registry)
        self._load_seconds = _histogram(declared.LOAD_SECONDS, registry)
        self._commit_seconds = _histogram(declared.COMMIT_SECONDS, registry)
        self._save_blocked_seconds = _histogram(declared.SAVE_BLOCKED_SECONDS, registry)
        self._blocked_seconds = _histogram(declared.BLOCKED_SECONDS, registry)
        self._slot_seconds = _histogram(declared.SLOT_SECONDS, registry)
        self._queue_seconds = _histogram(declared.QUEUE_SECONDS, registry)
        self._write_seconds = _histogram(declared.WRITE_SECONDS, registry)
        self._staged_bytes = _counter(declared.STAGED_BYTES, registry)
        self._written_bytes = _counter(declared.WRITTEN_BYTES, registry)
        self._kept_bytes = _counter(declared.KEPT_BYTES, registry)
        self._rescued_parts = _counter(declared.RESCUED_PARTS, registry)
        self._permit_seconds = _histogram(declared.PERMIT_SECONDS, registry)
        self._permits_lost = _counter(declared.PERMITS_LOST, registry)
        self._io_errors = _counter(declared.IO_ERRORS, registry)
        self._sync_seconds = _histogram(declared.SYNC_SECONDS, registry)
        self._auth_refused = _counter(declared.AUTH_REFUSED, registry)
        self._requests_refused = _counter(declared.REQUESTS_REFUSED, registry)
        self._status_writes = _counter(declared.STATUS_WRITES, registry)
        self._events = _counter(declared.EVENTS, registry)
        for kind in SaveKind:  # so that a rate is 0, not absent, before the first
            for metric in (
                self._commits,
                self._late_parts,
                self._staged_bytes,
                self._written_bytes,
                self._kept_bytes,
                self._rescued_parts,
            ):
                metric.labels(kind.value)
            self._save_blocked_seconds.labels(kind.value)
            for reason in AbortReason:
                self._aborts.labels(kind.value, reason.value)
        for source in ("memory", "volume"):
            self._loaded_bytes.labels(source)
        for doing in declared.IO_DOINGS:
            self._io_errors.labels(doing)
        for code in {*declared.AUTH_CODES, *BY_CODE}:
            self._refusals(code)
        for outcome in declared.STATUS_OUTCOMES:
            self._status_writes.labels(outcome)
        for outcome in declared.EVENT_OUTCOMES:
            self._events.labels(outcome)
        # Of the save that ends: how long each rank was blocked by all its parts.
        self._blocked: defaultdict[int, float] = defaultdict(float)
        self._syncs = 0
        self._view = ViewCollector()
        registry.register(self._view)

    def committed(self, kind: SaveKind, info: CommittedInfo, seconds: float) -> None:
        """See `Observer`."""
        exemplar = {"step": str(info.step), "attempt": str(info.owner.attempt)}
        self._commits.labels(kind.value).inc()
        self._commit_seconds.labels(kind.value).observe(seconds, exemplar)
        self._ended(kind)

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        """See `Observer`."""
        self._aborts.labels(key.kind.value, cause.reason.value).inc()
        self._ended(key.kind)

    def set_aside(self, step: int) -> None:
        """See `Observer`."""
        self._set_aside.inc(exemplar={"step": str(step)})

    def loaded(self, attempt: int, report: LoadReport) -> None:
        """See `Observer`."""
        neighbour = min(report.neighbour_bytes or 0, report.memory_bytes)
        self._loaded_bytes.labels("memory").inc(report.memory_bytes - neighbour)
        self._loaded_bytes.labels("neighbour").inc(neighbour)
        self._loaded_bytes.labels("volume").inc(report.volume_bytes)
        exemplar = {"step": str(report.step), "attempt": str(attempt)}
        self._load_seconds.observe(report.seconds, exemplar)

    def of_mirror(self) -> "MirrorMetrics":
        """Those of a mirror, which are in scrapes from now on; once."""
        return MirrorMetrics(self._registry)

    def late_part(self, kind: SaveKind) -> None:
        """See `Observer`."""
        self._late_parts.labels(kind.value).inc()

    def written(self, receipt: Receipt) -> None:
        """See `Observer`."""
        kind = receipt.kind.value
        self._blocked[receipt.rank] += receipt.blocked_seconds
        # Which part was slow.
        exemplar = {
            "step": str(receipt.step),
            "component": receipt.component,
            "rank": str(receipt.rank),
        }
        self._blocked_seconds.labels(kind).observe(receipt.blocked_seconds, exemplar)
        self._slot_seconds.labels(kind).observe(receipt.slot_seconds, exemplar)
        self._queue_seconds.labels(kind).observe(receipt.queue_seconds, exemplar)
        self._write_seconds.labels(kind).observe(receipt.seconds, exemplar)
        self._staged_bytes.labels(kind).inc(receipt.staged_bytes)
        self._written_bytes.labels(kind).inc(receipt.written_bytes)
        self._kept_bytes.labels(kind).inc(receipt.kept_bytes)
        self._rescued_parts.labels(kind).inc(receipt.rescued)

    def permit_granted(self, seconds: float) -> None:
        """See `Observer`."""
        self._permit_seconds.observe(seconds)

    def permit_ended(self) -> None:
        """See `Observer`."""
        self._permits_lost.inc()

    def io_error(self, doing: str) -> None:
        """See `Observer`."""
        self._io_errors.labels(doing).inc()

    def weights_reported(self, report: WeightsReport) -> None:
        """See `Observer`."""
        # The count begins anew with each attempt.
        if report.syncs not in (0, self._syncs) and report.last_duration_seconds is not None:
            exemplar = {"version": str(report.trainer_version)}
            self._sync_seconds.observe(report.last_duration_seconds, exemplar)
        self._syncs = report.syncs

    def refused(self, code: str) -> None:
        """A request was refused, with this code of a `MonitorError`."""
        self._refusals(code).inc()

    def status_written(self, outcome: str) -> None:
        """``written``, ``error`` or ``conflict``."""
        self._status_writes.labels(outcome).inc()

    def event(self, outcome: str) -> None:
        """``posted``, ``failed`` or ``dropped``."""
        self._events.labels(outcome).inc()

    def render(
        self, view: CoreView, report: ProgressReport | None, *, lease_held: bool, accept: str = ""
    ) -> tuple[bytes, str]:
        """The exposition for one scrape and its content type.

        Args:
            accept: the request's Accept header; with OpenMetrics, histograms carry exemplars.
        """
        self._view.show(view, report, lease_held=lease_held)
        encode, content_type = choose_encoder(accept)
        return encode(_Labelled(self._registry, self._labels)), content_type

    def _refusals(self, code: str) -> Counter:
        # Refused for the caller, or for the request.
        is_auth = code in declared.AUTH_CODES
        return (self._auth_refused if is_auth else self._requests_refused).labels(code)

    def _ended(self, kind: SaveKind) -> None:
        if self._blocked:
            self._save_blocked_seconds.labels(kind.value).observe(max(self._blocked.values()))
            self._blocked.clear()


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.meaning, metric.label_names, registry=registry)


def _gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    return Gauge(metric.name, metric.meaning, registry=registry)


def _histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(
        metric.name, metric.meaning, metric.label_names, buckets=metric.buckets, registry=registry
    )


class MirrorMetrics:
    """A `MirrorObserver`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = _histogram(declared.MIRROR_SECONDS, registry)
        self._bytes = _counter(declared.MIRROR_BYTES, registry)
        self._failures = _counter(declared.MIRROR_FAILURES, registry)
        self._behind = _gauge(declared.MIRROR_BEHIND, registry)

    def mirrored(self, step: int, seconds: float) -> None:
        """See `MirrorObserver`."""
        self._seconds.observe(seconds, {"step": str(step)})

    def mirrored_bytes(self, count: int) -> None:
        """See `MirrorObserver`."""
        self._bytes.inc(count)

    def mirror_failed(self) -> None:
        """See `MirrorObserver`."""
        self._failures.inc()

    def mirror_behind(self, since: datetime | None) -> None:
        """See `MirrorObserver`."""
        self._behind.set(0 if since is None else since.timestamp())


class _Labelled(Collector):
    """A registry whose series all have some labels more."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            labelled = Family(family.name, family.documentation, family.type)
            labelled.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in family.samples
            ]
            yield labelled
