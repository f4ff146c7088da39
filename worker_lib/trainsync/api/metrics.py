"""How a Prometheus metric is declared; the catalogue in docs/metrics.md is made from these."""

from dataclasses import dataclass
from enum import StrEnum


class MetricType(StrEnum):
    """As Prometheus types them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Label:
    """One label of a metric.

    Args:
        most: values that it has in one process at a time, at most: what bounds the cardinality.
    """

    name: str
    values: str
    most: int


@dataclass(frozen=True)
class Metric:
    """One metric family.

    Args:
        name: as it is queried, with ``_total`` where it is a counter; histograms have ``_bucket``,
            ``_sum`` and ``_count`` behind it.
        unit: of its values, in base units; empty for plain counts.
        meaning: one sentence, also the ``# HELP`` line.
        buckets: upper bounds, of a histogram alone.
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
        """Series that one process exposes of it at a time, at most."""
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
