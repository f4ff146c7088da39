"""The dashboard *Operator*: the operator's queue and its requests to the API server."""

from typing import Final

from monitoring import queries
from monitoring.board import OPERATOR, add, board, render
from monitoring.panels import GREEN, PHASES, RED, YELLOW, Part, Query, line, number, row

_WINDOW: Final = "5m"


def _rate(metric: str, by: str, labels: str = "") -> str:
    return f"sum by ({by}) (rate({queries.select(metric, labels)}[{_WINDOW}]))"


def _quantiles(metric: str, by: str = "", name: str = "") -> list[Query]:
    return [
        Query(queries.quantile(share, metric, "", _WINDOW, by), f"{name}p{share * 100:g}")
        for share in (0.5, 0.95, 0.99)
    ]


def build() -> str:
    """The dashboard's JSON."""
    made = board(
        OPERATOR,
        "trainsync / Operator",
        "Whether the operator leads, keeps up and gets through to the API server.",
        since="now-3h",
    )
    add(made, [*_glance(), *_work(), *_api()])
    return render(made)


def _glance() -> list[Part]:
    failed = 'result!="success"'
    return [
        number(
            "Leaders",
            "Processes that lead: one, and nothing is looked after while there is none.",
            "none",
            Query("sum(trainsync_operator_leader)"),
            thresholds=((None, RED), (1, GREEN), (2, RED)),
            width=4,
        ),
        number(
            "Last success",
            "Time since a reconcile went well; a run is looked at every five minutes at least.",
            "s",
            Query("time() - max(trainsync_operator_last_success_timestamp_seconds)"),
            thresholds=((None, GREEN), (600, YELLOW), (900, RED)),
            width=4,
            decimals=0,
        ),
        number("Runs", "TrainingRuns that it knows.", "none",
               Query("count(trainsync_run_info) or vector(0)"), width=4),
        number(
            "Waiting",
            "Runs that wait for a worker now.",
            "none",
            Query("sum(trainsync_operator_queue_depth)"),
            thresholds=((None, GREEN), (20, YELLOW), (100, RED)),
            width=4,
        ),
        number(
            "Failing",
            "Share of the reconciles that fail.",
            "percentunit",
            Query(
                f"sum(rate(trainsync_operator_reconciles_total{{{failed}}}[{_WINDOW}])) / "
                f"clamp_min(sum(rate(trainsync_operator_reconciles_total[{_WINDOW}])), 1e-9)"
            ),
            thresholds=((None, GREEN), (0.01, YELLOW), (0.1, RED)),
            width=4,
            decimals=1,
        ),
        number(
            "Monitors not ready",
            "Of runs that train.",
            "none",
            Query(
                f"count({queries.by_run('', 'trainsync_run_monitor_ready')} == 0 and "
                f"on (namespace, run) {queries.running('')}) or vector(0)"
            ),
            thresholds=((None, GREEN), (1, RED)),
            width=4,
        ),
    ]  # fmt: skip


def _work() -> list[Part]:
    return [
        row("Reconciling"),
        line(
            "Reconciles",
            "A second, by result: error is the API server's, fault is a bug of ours.",
            "reqps",
            Query(_rate("trainsync_operator_reconciles_total", "result"), "{{result}}"),
            stacked=True,
            colours={"success": GREEN, "error": "orange", "fault": RED},
        ),
        line(
            "Time a reconcile takes",
            "One look at one run.",
            "s",
            *_quantiles("trainsync_operator_reconcile_seconds"),
        ),
        line(
            "Queue and workers",
            "Runs that wait, and workers that are busy.",
            "none",
            Query("sum(trainsync_operator_queue_depth)", "waiting"),
            Query("sum(trainsync_operator_workers_busy)", "workers busy"),
            style="steps",
        ),
        line(
            "Retries",
            "Runs put back after a failed reconcile, a second.",
            "reqps",
            Query(f"sum(rate(trainsync_operator_queue_retries_total[{_WINDOW}]))", "retries"),
        ),
        line(
            "Leader",
            "Which process leads; a gap longer than the Lease (12 s) is an outage.",
            "none",
            Query("max by (instance) (trainsync_operator_leader)", "{{instance}}"),
            style="steps",
            maximum=1,
        ),
        line(
            "Runs by phase",
            "The TrainingRuns that it reconciles.",
            "none",
            Query("sum by (phase) (max by (namespace, run, phase) (trainsync_run_phase))",
                  "{{phase}}"),
            style="steps",
            stacked=True,
            colours=PHASES,
        ),
    ]  # fmt: skip


def _api() -> list[Part]:
    requests = "trainsync_operator_api_requests_total"
    return [
        row("API server"),
        line(
            "Requests by verb",
            "A second, without the watches.",
            "reqps",
            Query(_rate(requests, "verb"), "{{verb}}"),
            stacked=True,
        ),
        line(
            "Answers other than 200",
            "A second, by verb and status. 404 of a get is ordinary (not made yet), 409 of a "
            "status is a change under the hand; unreachable is not.",
            "reqps",
            Query(queries.or_none(_rate(requests, "code,verb", 'code!="200"'), "code"),
                  "{{verb}} {{code}}"),
        ),
        line(
            "Time a request takes",
            "95 of 100 are quicker, by verb.",
            "s",
            Query(
                queries.quantile(
                    0.95, "trainsync_operator_api_request_seconds", "", _WINDOW, "verb,"
                ),
                "{{verb}}",
            ),
        ),
        line(
            "Requests by resource",
            "A second.",
            "reqps",
            Query(_rate(requests, "resource"), "{{resource}}"),
            width=24,
        ),
    ]  # fmt: skip
