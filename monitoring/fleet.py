"""The dashboard *Fleet*: all runs, and those that need attention."""

from typing import Final

from monitoring import queries
from monitoring.board import FLEET, RUN_URL, add, annotation, board, label_variable, render
from monitoring.panels import (
    BLUE,
    GREEN,
    PHASES,
    RED,
    YELLOW,
    Column,
    Part,
    Query,
    line,
    number,
    row,
    runs_table,
)
from monitoring.rules import OPERATOR_ALERT, RECORDED

_AT_RISK: Final = "trainsync_run_at_risk_gpu_seconds"
_SOME: Final = 'namespace=~"$namespace"'
_RUN: Final = "{{namespace}}/{{run}}"
_AGE_STEPS: Final = ((None, GREEN), (3600, YELLOW), (4 * 3600, RED))
_GOODPUT_STEPS: Final = ((None, RED), (0.7, YELLOW), (0.9, GREEN))
_FREE_STEPS: Final = ((None, RED), (0.1, YELLOW), (0.25, GREEN))
# The operator's alert belongs to no run: its namespace is the operator's, or empty.
_FIRING: Final = (
    f'ALERTS{{alertname=~"Trainsync.+",alertstate="firing",{_SOME}}} or '
    f'ALERTS{{alertname="{OPERATOR_ALERT}",alertstate="firing"}}'
)


def build() -> str:
    """The dashboard's JSON."""
    made = (
        board(
            FLEET,
            "trainsync / Fleet",
            "All TrainingRuns: their state, the cost of a loss, and which need attention. "
            "Click a run's name to open it. Goodput and ages come from the recording rules.",
            since="now-6h",
        )
        .with_variable(
            label_variable(
                "namespace", "Namespace", "label_values(trainsync_run_info, namespace)", many=True
            )
        )
        .annotation(annotation("Alerts", _FIRING, RED))
    )
    add(made, [*_glance(), _table(), *_trends(), *_troubles()])
    return render(made, [("{{alertname}}", "{{namespace}}/{{run}}: {{severity}}")])


def _under_way(expr: str) -> str:
    """Excludes ended runs: their monitors keep exporting the last values."""
    return f"{expr} and on (namespace, run) {queries.under_way(_SOME)}"


def _recorded(key: str) -> str:
    """A recorded series of each run, without the series' name, from which Grafana would make
    rows."""
    return queries.by_run(_SOME, RECORDED[key])


def _in_phase(phase: str) -> str:
    chosen = queries.by_run(_SOME, "trainsync_run_phase", f'phase="{phase}"')
    return f"sum({chosen})"


def _glance() -> list[Part]:
    return [
        number(
            "Running", "Runs that train now.", "none", Query(_in_phase("Running")),
            thresholds=((None, BLUE), (1, GREEN)),
        ),
        number(
            "Restarting", "Runs between two attempts.", "none", Query(_in_phase("Restarting")),
            thresholds=((None, GREEN), (1, YELLOW)),
        ),
        number(
            "Failed", "Runs that have failed for good.", "none", Query(_in_phase("Failed")),
            thresholds=((None, GREEN), (1, RED)),
        ),
        number(
            "Complete", "Runs that have ended well.", "none", Query(_in_phase("Complete"))
        ),
        number(
            "Alerts firing", "Of trainsync's own.", "none",
            Query(f"count({_FIRING}) or vector(0)"),
            thresholds=((None, GREEN), (1, RED)),
        ),
        number(
            "Oldest checkpoint", "Of the runs under way: the longest time since a commit.", "s",
            Query(f"max({_under_way(queries.checkpoint_age(_SOME))})"),
            thresholds=_AGE_STEPS, decimals=0, no_value="nothing runs",
        ),
        number(
            "Goodput", "Mean of the runs under way, over an hour: time in steps that count.",
            "percentunit", Query(f"avg({_under_way(_recorded('goodput'))})"),
            thresholds=_GOODPUT_STEPS, decimals=1,
        ),
        number(
            "Least room", "Share that is free of the fullest checkpoint volume.", "percentunit",
            Query(f"min({_recorded('volume')})"),
            thresholds=_FREE_STEPS, decimals=0,
        ),
    ]  # fmt: skip


def _table() -> Part:
    return runs_table(
        "Runs",
        "A row for each run. Goodput, ages, lag and steps at risk (which a restart now would "
        "train again) only of those under way.",
        [
            Column("Info", queries.by_run(_SOME, "trainsync_run_info", also="phase,attempt")),
            Column("Step", queries.by_run(_SOME, "trainsync_run_step")),
            Column("Of", queries.by_run(_SOME, "trainsync_run_total_steps")),
            Column(
                "Steps/min", queries.by_run(_SOME, "trainsync_run_steps_per_minute"), decimals=1
            ),
            Column(
                "Goodput",
                _under_way(_recorded("goodput")),
                "percentunit",
                _GOODPUT_STEPS,
                decimals=1,
            ),
            Column("Checkpoint age", _under_way(_recorded("age")), "s", _AGE_STEPS, decimals=0),
            Column("Steps at risk", _under_way(_recorded("at_risk"))),
            Column("Lag", _under_way(queries.by_run(_SOME, "trainsync_weights_lag"))),
            Column(
                "Restarts",
                queries.by_run(_SOME, "trainsync_run_restarts_total"),
                thresholds=((None, GREEN), (1, YELLOW), (3, RED)),
            ),
            Column(
                "Volume free",
                _recorded("volume"),
                "percentunit",
                _FREE_STEPS,
                decimals=0,
            ),
        ],
        RUN_URL,
        hidden=["Value #A"],
    )


def _trends() -> list[Part]:
    return [
        row("Trends"),
        line(
            "Runs by phase",
            "How many runs are in which phase.",
            "none",
            Query(
                "sum by (phase) "
                f"({queries.by_run(_SOME, 'trainsync_run_phase', also='phase')}) > 0",
                "{{phase}}",
            ),
            stacked=True,
            style="steps",
            colours=PHASES,
        ),
        line(
            "Goodput, the ten lowest",
            "Over an hour: time in steps that count.",
            "percentunit",
            Query(f"bottomk(10, {_under_way(_recorded('goodput'))})", _RUN),
            maximum=1,
        ),
        line(
            "Blocked by saves, the ten highest",
            "Share of an hour for which saves held training up.",
            "percentunit",
            Query(f"topk(10, {_under_way(_recorded('blocked'))})", _RUN),
        ),
        line(
            "Oldest checkpoints",
            "Time since the newest commit; the ten oldest.",
            "s",
            Query(f"topk(10, {_under_way(_recorded('age'))})", _RUN),
        ),
        line(
            "At risk, the ten largest",
            "What a preemption now would cost: the time since the last commit, times the GPUs of "
            "the run's pods.",
            "s",
            Query(f"topk(10, {_under_way(queries.by_run(_SOME, _AT_RISK))})", _RUN),
        ),
        line(
            "Lag, the ten largest",
            "Training steps that the explorer furthest behind is behind.",
            "none",
            Query(f"topk(10, {_under_way(queries.by_run(_SOME, 'trainsync_weights_lag'))})", _RUN),
        ),
        line(
            "Room on the volumes, the ten fullest",
            "Share of the file system that is free.",
            "percentunit",
            Query(f"bottomk(10, {_recorded('volume')})", _RUN),
            maximum=1,
            thresholds=((None, RED), (0.1, GREEN)),
        ),
    ]


def _troubles() -> list[Part]:
    return [
        row("Trouble"),
        line(
            "Attempts failed, an hour",
            "By class, of all runs.",
            "none",
            Query(
                queries.or_none(
                    "sum by (class)"
                    f" (increase(trainsync_run_failures_by_class_total{{{_SOME}}}[1h])) > 0",
                    "class",
                ),
                "{{class}}",
            ),
            stacked=True,
            style="bars",
            width=12,
        ),
        line(
            "Attempts lost, an hour",
            "By cause, of all runs.",
            "none",
            Query(
                queries.or_none(
                    f"sum by (reason) (increase(trainsync_run_failures_total{{{_SOME}}}[1h])) > 0",
                    "reason",
                ),
                "{{reason}}",
            ),
            stacked=True,
            style="bars",
            width=12,
        ),
        line(
            "Saves before pods went, an hour",
            "Asked for by a suspension or a preemption: saved in time, late, failed, or the job "
            "ended before.",
            "none",
            Query(
                queries.or_none(
                    "sum by (outcome)"
                    f" (increase(trainsync_run_stop_saves_total{{{_SOME}}}[1h])) > 0",
                    "outcome",
                ),
                "{{outcome}}",
            ),
            stacked=True,
            style="bars",
            width=12,
        ),
        line(
            "Saves aborted, an hour",
            "By cause, of all runs.",
            "none",
            Query(
                queries.or_none(
                    "sum by (cause) "
                    f"(increase(trainsync_checkpoint_aborts_total{{{_SOME}}}[1h])) > 0",
                    "cause",
                ),
                "{{cause}}",
            ),
            stacked=True,
            style="bars",
            width=12,
        ),
    ]
