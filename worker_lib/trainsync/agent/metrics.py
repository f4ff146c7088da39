"""Prometheus metrics of one agent. An unknown value has no series."""

import time
from collections.abc import Callable, Iterator
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from trainsync.agent import metrics_catalogue as declared
from trainsync.agent.admission.judgement import Judgement, Verdict
from trainsync.agent.state import AgentState, ReadinessLimits, UpdateOutcome
from trainsync.api.metrics import Metric
from trainsync.engines.servers.preparing import PreparationOutcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


FetchSource = Literal["volume", "fellow", "store"]
_SOURCES: Final[tuple[FetchSource, ...]] = get_args(FetchSource)


class AgentMetrics:
    """Counts an agent's updates, bytes and proofs; any thread.

    Args:
        state: gives the present state, from which gauges are made at every scrape.
        clock: of that state's times.
    """

    def __init__(
        self,
        state: Callable[[], AgentState],
        limits: ReadinessLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = CollectorRegistry()
        self._outcomes = _counter(declared.UPDATES, self._registry)
        self._update_seconds = _histogram(declared.UPDATE_SECONDS, self._registry)
        self._pause_seconds = _histogram(declared.PAUSE_SECONDS, self._registry)
        self._preparations = _counter(declared.PREPARATIONS, self._registry)
        for preparation in PreparationOutcome:
            self._preparations.labels(preparation.value)
        self._staged_bytes = _counter(declared.STAGED_BYTES, self._registry)
        self._fetched = _counter(declared.FETCHED_BYTES, self._registry)
        self._fellow_failures = _counter(declared.FELLOW_FAILURES, self._registry)
        self._unheld = _counter(declared.UNHELD_VERSIONS, self._registry)
        for source in _SOURCES:
            self._fetched.labels(source)
        self._proofs = _counter(declared.PROOFS, self._registry)
        self._proof_seconds = _histogram(declared.PROOF_SECONDS, self._registry)
        for verdict in Verdict:
            self._proofs.labels(verdict.value)
        for outcome in UpdateOutcome:  # so that a rate is 0, not absent, before the first
            self._outcomes.labels(outcome.value)
        self._gauges = _Gauges(state, limits, clock)
        self._registry.register(self._gauges)

    def ended(self, outcome: UpdateOutcome) -> None:
        """Counts an attempt to bring a version, by its outcome."""
        self._outcomes.labels(outcome.value).inc()

    def prepared(self, outcome: PreparationOutcome) -> None:
        """Counts the preparation of a version, by its outcome."""
        self._preparations.labels(outcome.value).inc()

    def loaded(self, pause_seconds: float) -> None:
        """Records the pause in which the server took a version, which is not proven yet."""
        self._pause_seconds.observe(pause_seconds)

    def updated(self, seconds: float) -> None:
        """Counts an update after which the server serves the version, and records its time."""
        self.ended(UpdateOutcome.UPDATED)
        self._update_seconds.observe(seconds)
        self._gauges.updated_at = time.time()

    def judged(self, judgement: Judgement, seconds: float) -> None:
        """Counts a judgement on the server's weights.

        Args:
            seconds: that it took; recorded where the server was asked.
        """
        self._proofs.labels(judgement.verdict.value).inc()
        if judgement.verdict is not Verdict.ABSENT:
            self._proof_seconds.observe(seconds)
            self._gauges.judgement = judgement

    def staged(self, count: int) -> None:
        """Counts bytes laid into shared memory."""
        self._staged_bytes.inc(count)

    def fetched(self, source: FetchSource, count: int) -> None:
        """Counts bytes of a version that were fetched from ``source``."""
        self._fetched.labels(source).inc(count)

    def fellow_failed(self) -> None:
        """Counts a file that a fellow did not give."""
        self._fellow_failures.inc()

    def not_held(self) -> None:
        """Counts a version of which nothing, or not all, is held for fellows."""
        self._unheld.inc()

    def render(self) -> bytes:
        """The exposition, in Prometheus's text format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(
        self, state: Callable[[], AgentState], limits: ReadinessLimits, clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._limits = limits
        self._clock = clock
        self.updated_at: float | None = None
        self.judgement: Judgement | None = None

    def collect(self) -> Iterator[Family]:
        """See `Collector`."""
        state, now = self._state(), self._clock()
        last = self.judgement
        looked = None if state.looked_at is None else time.time() - (now - state.looked_at)
        values: list[tuple[Metric, float | None]] = [
            (declared.READY, state.unready(self._limits, now) is None),
            (declared.SERVER_UP, state.server is not None),
            (declared.VERSION, state.version),
            (declared.NEWEST, None if state.newest is None else state.newest.step),
            (declared.LAG, state.lag),
            (declared.LAST_LOOK, looked),
            (declared.LAST_UPDATE, self.updated_at),
            (declared.TYPICAL_OFF, None if last is None else last.typical),
            (declared.LARGEST_OFF, None if last is None else last.largest),
        ]
        for metric, value in values:
            family = GaugeMetricFamily(metric.name, metric.meaning)
            if value is not None:
                family.add_metric([], float(value))
            yield family


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.meaning, metric.label_names, registry=registry)


def _histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(
        metric.name, metric.meaning, metric.label_names, buckets=metric.buckets, registry=registry
    )
