"""Queries of the dashboard *Run* about one run. Pure."""

from typing import Final

from monitoring import queries
from monitoring.panels import Query

THIS: Final = 'namespace="$namespace",run="$run"'
WINDOW: Final = "10m"  # saves and syncs are rare: a shorter window would show gaps


def value(metric: str, also: str = "") -> str:
    """The newest value of a gauge; ``also`` are labels to keep in addition to the run's."""
    return queries.by_run(THIS, metric, also=also)


def increase(metric: str, by: str) -> str:
    """Growth of a counter in a window, by labels."""
    return f"sum by ({by}) (increase({metric}{{{THIS}}}[{WINDOW}]))"


def mean(metric: str) -> str:
    """Mean of a histogram, by kind of save; no value without observations."""
    top = f"sum by (kind) (rate({metric}_sum{{{THIS}}}[{WINDOW}]))"
    return f"{top} / (sum by (kind) (rate({metric}_count{{{THIS}}}[{WINDOW}])) > 0)"


def quantiles(metric: str, by: str = "") -> list[Query]:
    """Median and 95th percentile of a histogram; ``by`` are labels to keep, each with a comma."""
    name = "".join(f"{{{{{label}}}}} " for label in by.split(",") if label)
    return [
        Query(queries.quantile(share, metric, THIS, WINDOW, by), f"{name}p{share * 100:g}")
        for share in (0.5, 0.95)
    ]
