"""docs/metrics.md, from the metrics that the code declares. Pure."""

from collections.abc import Sequence
from typing import Final

from trainsync.api.metrics import Metric
from trainsync.monitor.server.metrics_catalogue import CATALOGUE as MONITOR
from trainsync.monitor.server.metrics_catalogue import RUN_LABELS
from trainsync_operator.metrics.catalogue import CATALOGUE as OPERATOR
from trainsync_operator.metrics.catalogue import MOST_RUNS

from monitoring.rules import Pace, alerts, recording_rules

_HEAD: Final = f"""# Metrics

<!-- Made by `make dashboards` from trainsync.monitor.server.metrics_catalogue and
trainsync_operator.metrics.catalogue: do not edit. -->

Each run's monitor serves `/metrics` on its Service `RUN-monitor:8080`, the operator on port 8080.
Every series of a run carries `namespace` and `run` by itself, so scrape with `honorLabels: true`
(`honor_labels`), as the chart's ServiceMonitor of the operator does; else Prometheus renames the
operator's `namespace` to `exported_namespace`, and dashboards and alerts find nothing. Prometheus
that asks for OpenMetrics gets exemplars with commits (`step`, `attempt`), parts of saves (`step`,
`component`, `rank`), synchronisations (`version`) and reconciles (`namespace`, `run`); it keeps
them with `--enable-feature=exemplar-storage`.

Counters of a monitor begin at 0 when it starts, `trainsync_weights_syncs_total`, `_losses_total`,
`_bytes_total` and `_resends_total` with each attempt; `rate()` and `increase()` take that into
account. A gauge whose value is not known has no series. *Most series* is the bound for one monitor,
or for one run in the operator (whose runs are reckoned as {MOST_RUNS}).

Histograms have `_bucket`, `_sum` and `_count` behind the name.
"""


def page() -> str:
    """The page."""
    labels = ", ".join(f"`{label.name}`" for label in RUN_LABELS)
    return "\n".join(
        [
            _HEAD,
            "## Of a run's monitor\n",
            f"All have the labels {labels} too.\n",
            *_table(MONITOR, 1),
            "\n## Of the operator\n",
            *_table(OPERATOR, MOST_RUNS),
            "\n## Recorded\n",
            "Of each run, by the rules in `charts/trainsync-operator/rules/`.\n",
            "| name | from |",
            "|---|---|",
            *(f"| `{rule['record']}` | `{rule['expr']}` |" for rule in recording_rules(Pace())),
            "\n## Alerts\n",
            "| alert | severity | after | says |",
            "|---|---|---|---|",
            *(
                f"| [{alert.name}](runbooks/{alert.runbook}.md) | {alert.severity} | "
                f"{Pace().window(alert.for_seconds)} | {_plain(alert.summary)} |"
                for alert in alerts(Pace())
            ),
            "",
        ]
    )


def _table(metrics: Sequence[Metric], runs: int) -> list[str]:
    lines = ["| name | type | unit | labels | most series | meaning |", "|---|---|---|---|---|---|"]
    for metric in metrics:
        labels = "; ".join(f"`{label.name}`: {label.values}" for label in metric.labels)
        per_run = metric.label_names[:2] == ("namespace", "run")
        series = metric.most_series // (runs if per_run else 1)
        lines.append(
            f"| `{metric.name}` | {metric.type} | {metric.unit} | {labels} | {series} "
            f"| {metric.meaning} |"
        )
    return lines


def _plain(summary: str) -> str:
    return summary.replace("{{ $labels.namespace }}/{{ $labels.run }}", "NAMESPACE/RUN")
