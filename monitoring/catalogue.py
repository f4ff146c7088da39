"""Generates docs/metrics.md from the metrics declared in code. Pure."""

from collections.abc import Sequence
from math import prod
from textwrap import fill
from typing import Final

from trainsync.agent.metrics_catalogue import CATALOGUE as AGENT
from trainsync.api.metrics import Label, Metric, MetricType
from trainsync.api.protocol import SaveKind
from trainsync.monitor.server.metrics_catalogue import CATALOGUE as MONITOR
from trainsync_operator.metrics.catalogue import CATALOGUE as OPERATOR
from trainsync_operator.metrics.catalogue import RUN_LABELS as OF_A_RUN

from monitoring.rules import RECORDED, Pace, alerts

# Up to so many series of a metric the page does not say how many.
_FEW: Final = 50
_KINDS: Final = " or ".join(f"`{kind.value}`" for kind in SaveKind)
_HEAD: Final = f"""# Metrics

<!-- Made by `make dashboards` from trainsync.monitor.server.metrics_catalogue,
trainsync_operator.metrics.catalogue and trainsync.agent.metrics_catalogue: do not edit. -->

Each run's monitor serves `/metrics` on its Service `RUN-monitor:8080`, the operator on port 8080.
Series of a run have the labels `namespace` and `run`: scrape with `honorLabels: true`
(`honor_labels`), as the chart's ServiceMonitor does, or dashboards and alerts find nothing.

- A name that ends in `_total` is a counter; others are gauges, but for histograms.
- The label `kind` is {_KINDS}; another label is explained where it first comes. A
  number in brackets is the most series of one monitor, operator or run, above {_FEW}.
- A monitor's counters begin at 0 when it starts, `trainsync_weights_…_total` with each
  attempt. A gauge without a known value has no series. Timestamps are Unix time.
- With `--enable-feature=exemplar-storage`, Prometheus keeps exemplars of commits, parts of saves,
  synchronisations and reconciles.
"""
_RECORDED: Final = {
    "goodput": "share of the last hour spent on steps that count",
    "blocked": "share of the last hour that saves stopped training",
    "repeated": "share of the last hour's steps that were repeated",
    "age": "seconds since the newest committed checkpoint",
    "at_risk": "steps trained since the newest committed checkpoint",
    "volume": "share of the file system that is free",
}


def page() -> str:
    """The text of docs/metrics.md."""
    runs = [metric for metric in OPERATOR if metric.labels[: len(OF_A_RUN)] == OF_A_RUN]
    return "\n".join(
        [
            _HEAD,
            "## Of a run's monitor\n",
            *_items(MONITOR),
            "\n## Of the operator\n",
            *_items([metric for metric in OPERATOR if metric not in runs]),
            "\n## Of the operator, for each run\n",
            *_items(runs, OF_A_RUN),
            "\n## Of an agent beside a server\n",
            "On the agent's `--port` ([Servers](servers.md)), without the run's labels.\n",
            *_items(AGENT),
            "\n## Recorded\n",
            "For each run, by the chart's `rules/`.\n",
            *(_item(f"`{name}`", _RECORDED[key]) for key, name in RECORDED.items()),
            "\n## Alerts\n",
            "With severity, and for how long its condition must hold.\n",
            *(
                f"- [{alert.name}](runbooks/{alert.runbook}.md): {alert.severity}, "
                f"{Pace().window(alert.for_seconds)}"
                for alert in alerts(Pace())
            ),
            "",
        ]
    )


def _items(metrics: Sequence[Metric], common: tuple[Label, ...] = ()) -> list[str]:
    """The lines of a list; the labels ``common`` to all of its metrics are left out, and each other
    label is explained at its first metric."""
    lines = []
    explained: set[Label] = set()
    histograms = [metric for metric in metrics if metric.type is MetricType.HISTOGRAM]
    for metric in [*(one for one in metrics if one not in histograms), *histograms]:
        if metric in histograms[:1]:
            lines.append("\nHistograms:\n")
        labels = [label for label in metric.labels if label not in common]
        series = metric.most_series // prod(label.most for label in common)
        name = f"`{metric.name}`"
        if labels:
            name = f"`{metric.name}{{{','.join(label.name for label in labels)}}}`"
        if series > _FEW:
            name += f" ({series})"
        lines.append(_item(name, _meaning(metric, [one for one in labels if one not in explained])))
        explained |= set(labels)
    return lines


def _item(name: str, meaning: str) -> str:
    return fill(
        f"- {name}: {meaning}",
        width=120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _meaning(metric: Metric, labels: Sequence[Label]) -> str:
    told = [label for label in labels if label.values and label.name != "kind"]
    values = "; ".join(f"`{label.name}`: {label.values}" for label in told)
    return f"{metric.meaning} {values}".rstrip()
