"""The operator's Prometheus metrics, declared in `trainsync_operator.metrics.catalogue`."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from trainsync.api.failure_policy import FailureClass
from trainsync.api.metrics import Metric

from trainsync_operator.metrics import catalogue as declared
from trainsync_operator.metrics.runs import RunCollector
from trainsync_operator.reconcile.decide.stopping import StopOutcome
from trainsync_operator.reconcile.run import Key, Run


class Metrics:
    """All series. The series of a run come from its last reconcile."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.reconciles = _counter(declared.RECONCILES, registry)
        self._seconds = _histogram(declared.RECONCILE_SECONDS, registry)
        self.retries = _counter(declared.RETRIES, registry)
        self.depth = _gauge(declared.DEPTH, registry)
        self.busy = _gauge(declared.BUSY, registry)
        self.leader = _gauge(declared.LEADER, registry)
        self._api_requests = _counter(declared.API_REQUESTS, registry)
        self._api_seconds = _histogram(declared.API_SECONDS, registry)
        for result in ("success", "error", "fault"):  # so that rates start at 0
            self.reconciles.labels(result)
        self._runs = RunCollector()
        registry.register(self._runs)

    def succeeded(self) -> None:
        """A reconcile succeeded."""
        self.reconciles.labels("success").inc()
        self._runs.last_success = time.time()

    def reconciled(self, key: Key, seconds: float) -> None:
        """A reconcile ended, with any result."""
        self._seconds.observe(seconds, {"namespace": key.namespace, "run": key.name})

    def api_request(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """A request to the API server ended."""
        self._api_requests.labels(verb, resource, code).inc()
        self._api_seconds.labels(verb).observe(seconds)

    def seen(self, run: Run, mine: dict[str, Any]) -> None:
        """See `trainsync_operator.reconcile.reports.MetricsRecorder`."""
        self._runs.seen(run, mine)

    def attempt_failed(self, key: Key, reason: str, failure_class: FailureClass | None) -> None:
        """See `trainsync_operator.reconcile.reports.MetricsRecorder`."""
        self._runs.attempt_failed(key, reason, failure_class)

    def stop_ended(self, key: Key, outcome: StopOutcome) -> None:
        """See `trainsync_operator.reconcile.reports.MetricsRecorder`."""
        self._runs.stop_ended(key, outcome)

    def gone(self, key: Key) -> None:
        """See `trainsync_operator.reconcile.reports.MetricsRecorder`."""
        self._runs.gone(key)


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.meaning, metric.label_names, registry=registry)


def _gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    return Gauge(metric.name, metric.meaning, metric.label_names, registry=registry)


def _histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(
        metric.name, metric.meaning, metric.label_names, buckets=metric.buckets, registry=registry
    )
