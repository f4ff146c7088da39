"""Declarations of Prometheus metrics, from which docs/metrics.md is generated."""

from dataclasses import dataclass
from enum import StrEnum


class MetricType(StrEnum):
    """Prometheus's metric types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Label:
    """One label of a metric.

    Args:
        values: the values, or what they are; empty where the name says it.
        most: the most values of the label in one process at a time, which bounds the cardinality.
    """

    name: str
    values: str
    most: int


@dataclass(frozen=True)
class Metric:
    """One metric family.

    Args:
        name: name in queries: counters end with ``_total``; histograms append ``_bucket``, ``_sum``
            and ``_count``.
        unit: base unit of the values; empty for plain counts.
        meaning: one sentence, also the ``# HELP`` line.
        buckets: upper bounds; histograms only.
    """

    name: str
    type: MetricType
    unit: str
    meaning: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels, in order."""
        return tuple(label.name for label in self.labels)

    @property
    def most_series(self) -> int:
        """The most series of the metric that one process exposes at a time."""
        count = len(self.buckets) + 3 if self.type is MetricType.HISTOGRAM else 1
        for label in self.labels:
            count *= label.most
        return count


def counter(name: str, meaning: str, *labels: Label, unit: str = "") -> Metric:
    """Declare a counter."""
    return Metric(name, MetricType.COUNTER, unit, meaning, labels)


def gauge(name: str, meaning: str, *labels: Label, unit: str = "") -> Metric:
    """Declare a gauge."""
    return Metric(name, MetricType.GAUGE, unit, meaning, labels)


def histogram(
    name: str, meaning: str, buckets: tuple[float, ...], *labels: Label, unit: str = "seconds"
) -> Metric:
    """Declare a histogram; ``buckets`` without +Inf."""
    return Metric(name, MetricType.HISTOGRAM, unit, meaning, labels, buckets)
